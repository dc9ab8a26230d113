#!/bin/sh
# GPT-2 124M on four ranks that share a GPU, each with an emulated network card: profile, plan, train by the plans.
#
#     bench/plan_gpt2.sh FOLDER [RATE]      as root, on a machine with a GPU; RATE: 10gbit
#
# FOLDER gets profile.json, near.json and lossy.json (plans), steps.csv, and for each plan a trace of what was predicted
# and what was measured, for ui.perfetto.dev. In the end prediction and measurement are printed beside each other.
set -e
folder=$1
rate=${2:-10gbit}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"

ranks() {
    "$python" -m gradzip emulate --gpu-share --hosts 4 --rate "$rate" -- "$@"
}

ranks "$python" -m gradzip profile --steps 14 --inter "$rate" --out "$folder/profile.json" -- \
    "$python" "$here/steps.py" --model gpt2 --torch '' --policies '' --steps 40
"$python" -m gradzip plan "$folder/profile.json" --out "$folder/near.json"
"$python" -m gradzip plan "$folder/profile.json" --lossy --out "$folder/lossy.json"
ranks "$python" "$here/steps.py" --model gpt2 --torch bf16 --policies "gcomp;$folder/near.json;$folder/lossy.json" \
    --network "4 x $rate" --csv "$folder/steps.csv"
"$python" "$here/plan_gpt2_check.py" "$folder"
