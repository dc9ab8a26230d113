#!/bin/sh
# What the tables need of real ranks: four that share a GPU, each with an emulated network card. As root.
#
#     experiments/real_ranks.sh DATA [PART ...]      PART: batch, accuracy, sentences, allreduce, gpt10, gpt1 (all)
#
# Rows that are there already are not run again (allreduce's are appended), so it may be broken off and called again.
# With LIMIT=256 it runs tiny forms, to see whether everything works: set OUT to a folder for their rows.
set -e
here=$(cd "$(dirname "$0")" && pwd)
data=$1
shift
python=${PYTHON:-python3}
out=${OUT:-$here}
options=${LIMIT:+--limit $LIMIT}
parts=${*:-batch accuracy allreduce gpt10 gpt1 sentences}
mkdir -p "$out/powersgd" "$out/gcomp" "$out/gpt"

ranks() { # rate in Gbit/s, then what each rank runs
    rate=$1
    shift
    "$python" -m gradzip emulate ${EMULATE:---gpu-share} --hosts 4 --rate "${rate}gbit" -- "$@"
}

train() { # rate, then options of real_ranks.py
    rate=$1
    shift
    ranks "$rate" "$python" "$here/real_ranks.py" --data "$data" --network "$rate Gbit/s" $options "$@"
}

dial='plain;torch bf16;gcomp;gcomp:own=lossless;gcomp:keep=7;gcomp:ulps=65536;gcomp:keep=5,round=truncate,feedback=false'
for part in $parts; do
    case $part in
    batch) # PowerSGD's ms per batch
        train 10 --task powersgd-cifar --epochs 1 --seconds "${SECONDS_EACH:-4}" --csv "$out/powersgd/times.csv" --policies \
            'plain;powersgd:rank=1;powersgd:rank=2;powersgd:rank=4;powersgd:rank=7;topk:ratio=0.015625;topk:ratio=0.003676;randomk:ratio=0.02278;randomk:ratio=0.00651;randomblock:ratio=0.02278;randomblock:ratio=0.00651;sign'
        ;;
    accuracy) # GComp's Figures 15 and 20
        train 10 --task gcomp-cifar --epochs 3 --evaluate-every 48 --csv "$out/gcomp/times.csv" --policies "$dial"
        ;;
    sentences)
        train 10 --task gcomp-sst2-adamw --evaluate-every 50 --csv "$out/gcomp/times.csv" --policies 'plain;torch bf16;gcomp'
        ;;
    allreduce) # GComp's Figure 10
        codecs='gcomp;gcomp:mode=lossless;gcomp:keep=7;zlib:level=1'
        if "$python" -c 'import zstandard' 2>/dev/null; then codecs="$codecs;zstd:level=1"; fi
        ranks 10 "$python" -m gradzip bench net --values "${VALUES:-11173962}" --rounds 3 --codecs "$codecs" \
            --csv "$out/gcomp/allreduce.csv"
        ;;
    gpt10 | gpt1)
        train "${part#gpt}" --task gpt2-enwik8 --seconds "${SECONDS_EACH:-12}" --check 1 --csv "$out/gpt/results.csv" \
            --policies 'plain;torch bf16;gcomp;gcomp:own=lossless;gcomp:keep=7;powersgd:rank=4;auto'
        ;;
    *)
        echo "unknown part $part" >&2
        exit 2
        ;;
    esac
done
