// The row of checks of a step: what the kernels of its messages have found out is put together by one launch, a group of
// threads for each message. All sums have a fixed order, so that ranks get the same numbers from the same frames.

constexpr u32 kRowThreads = 256;

// noise_row.py packs the same fields.
struct NoiseLevel {
    u64 level, notch, weight;  // addresses: of a sum's level and its frame's notch in what was gathered; of 4^(d + 12) summed up
};
struct NoiseCheck {
    u64 squares, blocks;           // double[blocks], of the means
    u64 levels, tensors;           // NoiseLevel[tensors]
    u64 status;                    // u32[frames]
    u64 own, owners;               // NoiseResult[owners] of the frames for other ranks
    u64 sum;                       // NoiseResult of the sum's
    u64 frames;                    // that may be wrong
    u64 norm_at, frames_at, own_at;  // places in the row
    double divisor;                // of the noise
};
struct NoiseRow {
    u64 checks;           // NoiseCheck[]
    u64 row;              // i64[]
    u64 shapes, results;  // i64 each, or 0: numbers that all ranks must have alike
    u64 digest;
};

DEVICE double ordered_total(double mine, double* per_warp) {
    mine = halved(mine);
    __syncthreads();
    if (lane_id() == 0) per_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    double total = 0.0;
    for (u32 w = 0; w < kRowThreads / 32; w++) total = total + per_warp[w];
    return total;
}
// Bits that are larger for larger numbers, and largest for NaN.
DEVICE u64 ordered_bits(double v) {
    u64 bits;
    memcpy(&bits, &v, 8);
    return bits & 0x7fffffffffffffffull;
}
DEVICE double power_of_root_two(u32 exponent) {
    u64 bits = (u64)(1023 + exponent / 2) << 52;
    double v;
    memcpy(&v, &bits, 8);
    return exponent % 2 ? v * 1.4142135623730951 : v;
}

DEVICE void noise_row(const Args& args) {
    __shared__ double per_warp[kRowThreads / 32];
    const NoiseRow& a = *(const NoiseRow*)&args;
    const NoiseCheck c = pointer<const NoiseCheck>(a.checks)[blockIdx.x];
    u64* row = pointer<u64>(a.row);
    u32 t = threadIdx.x;
    double squares = 0.0, noise = 0.0;
    for (u64 at = t; at < c.blocks; at += kRowThreads) squares = squares + pointer<const double>(c.squares)[at];
    for (u64 at = t; at < c.tensors; at += kRowThreads) {
        NoiseLevel found = pointer<const NoiseLevel>(c.levels)[at];
        double level = (double)*pointer<const float>(found.level);
        noise = noise + level * level * power_of_root_two(*pointer<const u16>(found.notch)) * (double)*pointer<const u64>(found.weight);
    }
    squares = ordered_total(squares, per_warp);
    noise = ordered_total(noise, per_warp);
    for (u64 at = t; at < c.frames; at += kRowThreads) row[c.frames_at + at] = pointer<const u32>(c.status)[at];
    if (t == 0) {
        row[c.norm_at] = ordered_bits(sqrt(squares));
        const NoiseResult *own = pointer<const NoiseResult>(c.own), sum_of = *pointer<const NoiseResult>(c.sum);
        u64 most = 0;
        u32 notch = 0, coarser = sum_of.notch > 0;
        for (u64 at = 0; at < c.owners; at++) {
            most = own[at].bytes > most ? own[at].bytes : most;
            notch = own[at].notch > notch ? own[at].notch : notch;
            coarser += own[at].notch > 0;
        }
        u64* rest = row + c.frames_at + c.frames;
        rest[0] = most, rest[1] = notch, rest[2] = sum_of.bytes, rest[3] = sum_of.notch;
        row[c.own_at] = ordered_bits(noise / c.divisor);
        row[c.own_at + 1] = coarser;
        if (blockIdx.x == 0) {
            u64 alike[3] = {a.digest, a.shapes ? *pointer<const u64>(a.shapes) : 0, a.results ? *pointer<const u64>(a.results) : 0};
            for (u32 j = 0; j < 3; j++) row[2 * j] = alike[j], row[2 * j + 1] = 0 - alike[j];
        }
    }
}
