"""`python -m training STAGE`: one stage of the recipe per command (training/README.md)."""

import sys

from bench.harness import run_command

STAGES = {
    "prepare": "prepare.Prepare",
    "answers": "answers.Answers",
    "train": "train.Train",
    "head": "head.TrainHead",
    "block": "block.TrainBlock",
    "export": "train.Export",
    "to-gguf": "gguf.ToGguf",
    "head-to-gguf": "gguf.HeadToGguf",
    "bits": "measure.HeldOutBits",
    "acceptance": "measure.Acceptance",
    "depths": "measure.Depths",
    "samples": "answers.Samples",
}


def main(arguments: list[str] | None = None) -> int:
    return run_command("training", __doc__, STAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
