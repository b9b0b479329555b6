"""Tokens, disk, memory and time of a run, before anything is spent."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import plan

    plan.run(cfg)


if __name__ == "__main__":
    main()
