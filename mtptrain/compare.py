"""The heads of a run side by side: acceptance, cost, speed and proof, from their reports."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import compare

    compare.run(cfg)


if __name__ == "__main__":
    main()
