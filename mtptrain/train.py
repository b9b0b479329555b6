"""The main job: every stage that is not complete yet, in order, through export.

Where a launcher started it on several ranks, the first does every stage but training, and the others wait.
"""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.ranks import ALONE, announced, leave

    ranks = ALONE
    if several := announced():
        from mtptrain.ranks import join
        from mtptrain.target.model import pick_device

        ranks = join(pick_device(cfg.device).type == "cpu", cfg.threads)
    ranks.first(lambda: _before_training(cfg))
    from mtptrain.stages import export, train, validate

    train.run(cfg)
    if several:
        leave()
    if ranks.is_first:
        validate.run(cfg)
        export.run(cfg)


def _before_training(cfg: Config) -> None:
    from mtptrain.stages import plan

    print(f"{cfg.run_dir}: {cfg.head_dir.name} head for {cfg.target.path}", flush=True)
    plan.refuse_if_it_cannot_fit(cfg)
    from mtptrain.stages import precompute, prepare, validate

    validate.check_first(cfg)
    prepare.run(cfg, for_training=True)
    plan.refuse_if_it_cannot_fit(cfg, target_is_here=True)
    precompute.run(cfg)


if __name__ == "__main__":
    main()
