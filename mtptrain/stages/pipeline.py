"""All stages in order. Where a launcher started the job on several ranks, the first does all but training, and the others wait."""

from mtptrain.config import Config
from mtptrain.ranks import ALONE, announced, leave
from mtptrain.stages import plan


def run(cfg: Config) -> None:
    """Every stage that is not complete yet, through export. Raises UserError."""
    ranks = ALONE
    if several := announced():
        from mtptrain.stages.train import meet

        ranks = meet(cfg)
    ranks.first(lambda: _before_training(cfg))
    from mtptrain.stages import export, train, validate

    train.run(cfg)
    if several:
        leave()
    if ranks.is_first:
        validate.run(cfg)
        export.run(cfg)


def _before_training(cfg: Config) -> None:
    print(f"{cfg.run_dir}: {cfg.head_dir.name} head for {cfg.target.path}", flush=True)
    plan.refuse_if_it_cannot_fit(cfg)  # before torch is imported
    from mtptrain.stages import precompute, prepare, validate

    validate.check_first(cfg)
    prepare.run(cfg, for_training=True)
    plan.refuse_if_it_cannot_fit(cfg, target_is_here=True)
    precompute.run(cfg)
