"""The main job: every stage that is not complete yet, in order, through export."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import pipeline

    pipeline.run(cfg)


if __name__ == "__main__":
    main()
