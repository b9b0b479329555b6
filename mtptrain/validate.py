"""Acceptance of the trained head, measured before it may be exported."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import validate

    validate.run(cfg)


if __name__ == "__main__":
    main()
