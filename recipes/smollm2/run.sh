#!/usr/bin/env bash
# The four runs of docs/results/smollm2.md. Arguments go to each of them, for example
#   recipes/smollm2/run.sh --model.path models/smollm2-135m --env.args.path data/sciknoweval
set -euo pipefail
cd "$(dirname "$0")/../.."
for method in sdpo grpo; do
  sdpo train recipes/smollm2/$method.toml --run.dir runs/smollm2/$method-full "$@"
  sdpo train recipes/smollm2/$method.toml recipes/smollm2/lora.toml --run.dir runs/smollm2/$method-lora "$@"
done
