"""The target's hidden states, kept in a store on disk."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import plan, precompute

    plan.refuse_if_it_cannot_fit(cfg)
    precompute.run(cfg)


if __name__ == "__main__":
    main()
