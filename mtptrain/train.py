"""The main job: every stage that is not complete yet, in order, through export."""

from mtptrain.cli import job
from mtptrain.config import Config


@job
def main(cfg: Config) -> None:
    from mtptrain.stages import plan

    print(f"{cfg.run_dir}: {cfg.head_dir.name} head for {cfg.target.path}", flush=True)
    plan.refuse_if_it_cannot_fit(cfg)
    from mtptrain.stages import export, precompute, prepare, train, validate

    validate.check_first(cfg)
    prepare.run(cfg, for_training=True)
    plan.refuse_if_it_cannot_fit(cfg, target_is_here=True)
    for stage in (precompute, train, validate, export):
        stage.run(cfg)


if __name__ == "__main__":
    main()
