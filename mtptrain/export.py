"""One folder per engine, from a validated head."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import export

    export.run(cfg)


if __name__ == "__main__":
    main()
