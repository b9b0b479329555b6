"""Prompts, responses written by the target, token ids and supervised spans."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import prepare

    prepare.run(cfg)


if __name__ == "__main__":
    main()
