#!/bin/sh
# What the tables need of real ranks: four that share a GPU, each with an emulated network card. As root.
#
#     experiments/real_ranks.sh DATA [PART ...]
#
#     batch       milliseconds per batch of PowerSGD's tables              10 Gbit/s
#     accuracy    GComp's Figures 15 and 20: ResNet-18 on CIFAR-10         10 Gbit/s
#     sentences   the same: MiniLM on SST-2                                10 Gbit/s
#     allreduce-pictures, allreduce-sentences: GComp's Figure 10, with RATE=1 at 1 instead of 10 Gbit/s
#     plans       profiles GPT-2 and plans for 10 and 1 Gbit/s, into OUT/gpt/plans
#     gpt10       GPT-2 with each policy, one after the other              10 Gbit/s
#     gpt1        the same, four clusters of four ranks side by side        1 Gbit/s
#     resnet10, resnet1: ResNet-50 with each policy, for docs/wall.svg       10 and 1 Gbit/s
#     promise     what noise promises, for six optimizers                   10 Gbit/s
#     scaling     GComp's Figures 16 and 17: an all-reduce of 2, 4 and 8 ranks, RATE=1 as above
#     routes      ResNet-50 on 2 hosts of 2 ranks by routes inside and between hosts, and what the planner predicts (wall/routes.txt)
#
# Without PART: all, in an order in which each finds what it needs. Rows that are there already are not run again
# (but for allreduce-*, which append), so it may be broken off and called again; a part that fails does not keep the others from
# running. Rows are written as they come.
#
# With LIMIT=256 it runs tiny forms, to see whether everything works: set OUT to a folder for their rows, and
# EMULATE=" " where there is no GPU. GPT10_SECONDS, GPT1_SECONDS and BATCH_SECONDS say how long each row trains.
here=$(cd "$(dirname "$0")" && pwd)
data=$1
shift
python=${PYTHON:-python3}
out=${OUT:-$here}
plans=$out/gpt/plans
options=${LIMIT:+--limit $LIMIT}
parts=${*:-plans gpt10 gpt1 resnet10 resnet1 accuracy batch sentences allreduce-pictures allreduce-sentences promise scaling routes}
mkdir -p "$out/powersgd" "$out/gcomp" "$out/wall" "$out/noise" "$plans"
all='plain;torch bf16;torch powersgd 4;noise;gcomp;gcomp:keep=7;powersgd:rank=4' # of docs/wall.svg

ranks() { # hosts, rate in Gbit/s, then what each rank runs
    hosts=$1
    rate=$2
    shift 2
    "$python" -m gradzip emulate ${EMULATE:---gpu-share} --hosts "$hosts" --rate "${rate}gbit" -- "$@"
}

train() { # hosts, rate, then options of real_ranks.py
    hosts=$1
    rate=$2
    shift 2
    ranks "$hosts" "$rate" "$python" "$here/real_ranks.py" --data "$data" --network "$rate Gbit/s" $options "$@"
}

plan() { # rate, name, then options
    rate=$1
    name=$2
    shift 2
    "$python" -m gradzip plan "$plans/profile.json" --inter "${rate}gbit" --out "$plans/$name.json" "$@"
}

allreduce() { # task, name of the gradient, learning rate that it is made with
    gradient=${TMPDIR:-/tmp}/gradzip-gradients/$2.pt
    mkdir -p "${gradient%/*}"
    if [ ! -f "$gradient" ]; then
        "$python" "$here/gcomp/gradient.py" --task "$1" --data "$data" --lr "$3" ${LIMIT:+--steps 2} "$gradient" || return
    fi
    ranks 4 "${RATE:-10}" "$python" -m gradzip bench net --input "$gradient" ${LIMIT:+--values "$LIMIT"000} --rounds "${ROUNDS:-3}" \
        --codecs "${CODECS:-gcomp;gcomp:mode=lossless;gcomp:keep=7;zstd:level=1;zlib:level=1}" \
        --csv "$out/gcomp/allreduce.csv"
}

run() {
    case $1 in
    batch)
        train 4 10 --task powersgd-cifar --epochs 1 --seconds "${BATCH_SECONDS:-3}" --csv "$out/powersgd/times.csv" --policies \
            'plain;powersgd:rank=1;powersgd:rank=2;powersgd:rank=4;powersgd:rank=7;topk:ratio=0.015625;topk:ratio=0.003676;randomk:ratio=0.02278;randomk:ratio=0.00651;randomblock:ratio=0.02278;randomblock:ratio=0.00651;sign'
        ;;
    accuracy)
        train 4 10 --task gcomp-cifar --epochs 4 --evaluate-every 32 --csv "$out/gcomp/times.csv" \
            --policies 'plain;torch bf16;gcomp;gcomp:keep=7'
        ;;
    sentences)
        train 4 10 --task gcomp-sst2-adamw --epochs 0.4 --evaluate-every 15 --csv "$out/gcomp/times.csv" \
            --policies 'plain;torch bf16;gcomp'
        ;;
    allreduce-pictures) allreduce gcomp-cifar resnet18-cifar10 1e-3 ;;
    allreduce-sentences) allreduce gcomp-sst2-adamw minilm-sst2 1e-4 ;;
    plans)
        ranks 4 10 "$python" -m gradzip profile --steps 14 --inter 10gbit --out "$plans/profile.json" --codec gcomp \
            --codec gcomp:keep=7 --codec powersgd:rank=4 -- \
            "$python" "$here/real_ranks.py" --data "$data" $options --task gpt2-enwik8 --policies plain --csv /dev/null &&
            plan 10 near10 && plan 1 near1
        ;;
    gpt10)
        train 4 10 --task gpt2-enwik8 --seconds "${GPT10_SECONDS:-15}" --check 1 --csv "$out/gpt/results.csv" --plans "$plans" \
            --policies 'plain;torch bf16;gcomp;gcomp:own=near;gcomp:keep=7;powersgd:rank=4;plan near10;noise;torch powersgd 4'
        ;;
    gpt1) # plain and bf16 by NCCL keep eight cores busy with looking, so they do not run at the same time
        train 16 1 --task gpt2-enwik8 --seconds "${GPT1_SECONDS:-56}" --check 1 --csv "$out/gpt/results.csv" --plans "$plans" \
            --clusters 4 --policies 'plain;gcomp;gcomp:keep=7;powersgd:rank=4;torch bf16;gcomp:own=near;plan near1;noise;torch powersgd 4'
        ;;
    resnet10) train 4 10 --task resnet50-cifar --seconds "${RESNET10_SECONDS:-12}" --csv "$out/wall/results.csv" --policies "$all" ;;
    resnet1) train 4 1 --task resnet50-cifar --seconds "${RESNET1_SECONDS:-20}" --check 1 --csv "$out/wall/results.csv" --policies "$all" ;;
    promise)
        ranks 4 10 "$python" "$here/noise/promise.py" --data "$data" --csv "$out/noise/promise.csv" \
            ${LIMIT:+--steps 12 --draws 4 --width 16 --blocks 1 --heads 2 --length 16}
        ;;
    scaling) # of the gradient that comes with gradzip, repeated to 10 million values
        for hosts in 2 4 8; do
            ranks "$hosts" "${RATE:-10}" "$python" -m gradzip bench net --values "${LIMIT:-10000}000" \
                --rounds "${ROUNDS:-3}" --csv "$out/gcomp/scaling.csv" \
                --codecs "${CODECS:-gcomp:mode=paper;gcomp;noise;gcomp:mode=lossless;gcomp:keep=7}" || return
        done
        ;;
    routes) ( # what changes here is for this part alone
        EMULATE="${EMULATE:---gpu-share} --ranks-per-host 2"
        ranks 2 10 "$python" -m gradzip profile --steps 14 --inter 10gbit --out "$plans/routes.json" --codec gcomp:keep=7 -- \
            "$python" "$here/real_ranks.py" --data "$data" $options --task resnet50-cifar --policies plain --csv /dev/null &&
            "$python" -m gradzip plan "$plans/routes.json" --codec gcomp:keep=7 --out "$plans/hosts.json" >"$out/wall/routes.txt" &&
            train 2 10 --task resnet50-cifar --seconds "${ROUTES_SECONDS:-6}" --csv "$out/wall/routes.csv" --plans "$plans" --policies \
                'plain;torch bf16;gcomp:keep=7/alltoall;gcomp:keep=7/hierarchical;gcomp:keep=7/hierarchical_ring;gcomp:keep=7/hierarchical_allgather;noise;plan hosts'
    ) ;;
    *)
        echo "unknown part $1" >&2
        return 2
        ;;
    esac
}

failed=
for part in $parts; do
    run "$part" || failed="$failed $part"
done
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
