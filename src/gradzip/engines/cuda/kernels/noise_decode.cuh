// Decoding: noise_open looks at the heads of frames and finds where blocks begin; then half a warp reads a block, a thread
// for each lane (noise_decode), or the same block of all ranks' frames in rank order, adding them up (noise_add).
//
// Nothing that a frame says leads outside its slot: sizes are checked before they are used. A frame or block that is not
// what it should be becomes NaN, and `status` tells which frame it was.

constexpr u32 kOpeners = 256;
constexpr u32 kFetched = 6144;  // bytes of a block that are read from shared memory; larger ones stay where they are

// What half a warp needs to decode a block.
struct NoiseDesk {
    __align__(16) u16 table[4096];
    __align__(16) u8 block[kFetched + 32];
};

DEVICE u32 byte_at(u64 address) { return *pointer<const u8>(address); }
DEVICE u32 half_at(u64 address) { return byte_at(address) | byte_at(address + 1) << 8; }
DEVICE u32 word_at(u64 address) { return half_at(address) | half_at(address + 2) << 16; }

DEVICE bool is_level(u32 bits) {
    float level = __uint_as_float(bits);
    return bits == 0 || bits == kCanonicalNan || (level >= kLeast && level <= kLargest);
}

// --- Heads of frames ---------------------------------------------------------------------------------------------------

// Frames are looked at by a group each. Where this rank adds frames up, levels of the sums are made as well.
DEVICE void noise_open(const Args& args) {
    __shared__ u32 wrong, per_warp[kOpeners / 32];
    const Noise& a = noise_args(args);
    u32 t = threadIdx.x, number = blockIdx.x;
    NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
    bool own = a.sums && number == a.rank;
    u32* status = pointer<u32>(a.status) + number;
    u32* verdict = pointer<u32>(a.verdicts) + number;
    if (t == 0) wrong = 0;
    __syncthreads();
    if (own) {
        if (t == 0) *status = 0, *verdict = kFine;
    } else {
        const u32* head = pointer<const u32>(f.slot + a.prefix);
        u64 body = f.room;
        if (a.prefix) {
            const u32* header = pointer<const u32>(f.slot);
            body = header[4] | (u64)header[5] << 32;
            u64 numel = header[2] | (u64)header[3] << 32;
            if (header[0] != kFrameStart || header[1] || numel != f.numel || body > f.room - a.prefix) wrong = kNoiseHeader;
        }
        if (body < kNoiseHead) wrong = kNoiseHeader;
        __syncthreads();
        bool readable = wrong == 0;
        __syncthreads();
        bool poisoned = false;
        if (readable) {
            u32 notch = head[1] & 0xffff, flags = head[1] >> 16;
            poisoned = flags == 1;
            if (head[0] != f.parts || notch > 127 || flags > 1 || (poisoned && body != kNoiseHead)) wrong = kNoiseHeader;
            else if (a.prefix && (head[2] != a.step || head[3] != a.digest)) wrong = kNoiseStep;
            else if (!poisoned && body < noise_blocks_offset(a, f) - a.prefix) wrong = kNoiseIndex;
        }
        __syncthreads();
        readable = wrong == 0 && !poisoned;
        __syncthreads();
        if (readable) {
            for (u32 at = t; at < f.parts; at += kOpeners)
                if (!is_level(head[4 + at])) wrong = kNoiseLevels;
            const u16* index = pointer<const u16>(f.slot + noise_index_offset(a, f));
            if (t == 0 && f.blocks % 2 && index[f.blocks]) wrong = kNoiseIndex;
            u64 offset = noise_blocks_offset(a, f);
            constexpr u32 kEach = 8;
            for (u32 first = 0; first < f.blocks; first += kEach * kOpeners) {
                u32 size[kEach], all = 0;
#pragma unroll
                for (u32 j = 0; j < kEach; j++) {
                    u32 at = first + kEach * t + j;
                    size[j] = at < f.blocks ? index[at] : 0;
                    all += size[j];
                }
                u32 upto = running_sum(all), lower = 0, sum_of = 0;
                if (lane_id() == 31) per_warp[t / 32] = upto;
                __syncthreads();
                for (u32 w = 0; w < kOpeners / 32; w++) {
                    if (w < t / 32) lower += per_warp[w];
                    sum_of += per_warp[w];
                }
                u64 begin = offset + lower + upto - all;
#pragma unroll
                for (u32 j = 0; j < kEach; j++) {
                    u32 at = first + kEach * t + j;
                    if (at < f.blocks) pointer<u64>(a.offsets)[f.first_block + at] = begin;
                    begin += size[j];
                }
                offset += sum_of;
                __syncthreads();
            }
            if (t == 0 && offset != body + a.prefix) wrong = kNoiseIndex;
        }
        __syncthreads();
        if (t == 0) {
            *status = wrong ? wrong : poisoned ? (u32)kNoisePoisoned : 0;
            *verdict = wrong ? kRefused : poisoned ? kPoisoned : kFine;
        }
    }
    if (!a.sums) return;
    for (u32 at = number * kOpeners + t; at < f.parts; at += kOpeners * a.world) {
        const NoisePart& p = pointer<const NoisePart>(a.parts)[f.first_part + at];
        double total = 0.0;
        for (u32 rank = 0; rank < a.world; rank++) {
            const NoiseFrame& other = pointer<const NoiseFrame>(a.frames)[rank];
            float level;
            if (rank == a.rank) level = pointer<const float2>(a.levels)[p.level].x;
            else level = __uint_as_float(*pointer<const u32>(other.slot + a.prefix + kNoiseHead + 4 * (u64)at));
            total = total + (double)level * (double)level;
        }
        float level = 0.0f;
        if (total != total) level = __uint_as_float(kCanonicalNan);
        else if (total != 0.0) level = as_level(((double)a.world + 1.0) / (2.0 * (double)a.world) * total);
        pointer<float2>(a.sum_levels)[pointer<const NoisePart>(a.sums)[at].level] = make_float2(level, reciprocal(level));
    }
}

// --- Where values go ---------------------------------------------------------------------------------------------------

enum { kMeans = 0, kFirst = 1, kAdded = 2 };  // what is done with decoded values

// The sum of squares of up to 8 values. Sums of float32 will do for a statistic, unless they overflow or vanish.
DEVICE double squares_of(const float* v, u32 which) {
    float sum_of = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum_of = __fadd_rn(sum_of, which >> j & 1 ? __fmul_rn(v[j], v[j]) : 0.0f);
    if (sum_of > 1e-30f && sum_of < 1e38f) return (double)sum_of;
    double wide = 0.0;
    for (int j = 0; j < 8; j++) wide = wide + (which >> j & 1 ? (double)v[j] * (double)v[j] : 0.0);
    return wide;
}

template <class F>
struct NoiseWriter {
    const Noise& a;
    const NoiseFrame& f;
    const NoisePart *part, *end;
    bool nan;      // nothing of the frame is to be believed
    float factor;
    u64 place, length, next, values;
    const i8* shape;
    float level;
    double squares;  // of the means so far

    __device__ NoiseWriter(const Noise& args, const NoiseFrame& frame, const NoisePart* first, const NoisePart* last, bool refused)
        : a(args), f(frame), part(first), end(last), nan(refused), factor(1.0f), squares(0.0) {
        if (!nan) factor = noise_tables(a).notches[*pointer<const u32>(f.slot + a.prefix + 4) & 127];
        open();
    }
    __device__ void open() {
        place = part->place, length = part->length, values = part->values;
        shape = pointer<const i8>(part->shape);
        next = part + 1 < end ? part[1].place : ~0ull;
        level = __uint_as_float(kCanonicalNan);
        if (!nan) {
            u64 number = (u64)(part - (end - f.parts));
            level = coarser(__uint_as_float(*pointer<const u32>(f.slot + a.prefix + kNoiseHead + 4 * number)), factor);
        }
    }
    // Eight integers at a place; those whose bit is set in `which`.
    template <int kWhat>
    __device__ void put(u64 at, const float* q, u32 which) {
        while (at >= next) {
            part++;
            open();
        }
        u64 i = at - place;
        if (i >= length) return;
        u32 here = length - i < 8 ? (u32)(length - i) : 8;
        float v[8];
        if (level == 0.0f || is_nan(level)) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = level;
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = __fmul_rn(q[j], level);
            if (shape)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if ((u32)j < here) v[j] = __fmul_rn(v[j], power_of_two(shape[i + j]));
        }
        if (kWhat == kMeans) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = canonical(a.times != 0.0f ? __fmul_rn(v[j], a.times) : __fdiv_rn(v[j], a.divisor));
            if (a.squares) {
                float stored[8];
#pragma unroll
                for (int j = 0; j < 8; j++) stored[j] = Values<F>::rounded(v[j]);
                squares = squares + squares_of(stored, which & ((1u << here) - 1));
            }
        }
        deliver<kWhat>(i, v, which & ((1u << here) - 1));
    }
    template <int kWhat>
    __device__ void deliver(u64 i, float* v, u32 which) {
        if (which == 255) {
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                if (kWhat == kAdded) {
                    float sums[4];
                    Values<F>::load_four(values, i + j, sums);
#pragma unroll
                    for (int k = 0; k < 4; k++) v[j + k] = __fadd_rn(sums[k], v[j + k]);
                }
                Values<F>::store_four(values, i + j, v + j);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (which >> j & 1) {
                    if (kWhat == kAdded) v[j] = __fadd_rn(Values<F>::load(values, i + j), v[j]);
                    Values<F>::store(values, i + j, v[j]);
                }
        }
    }
};

// --- One block ---------------------------------------------------------------------------------------------------------

// The bits of a lane. Words are read ahead, never behind `end`.
struct LaneReader {
    u64 window, at, end;
    u32 held, ahead, used;

    __device__ u32 next() {
        u32 word = at < end ? *pointer<const u32>(at) : 0;
        at += 4;
        return word;
    }
    __device__ void open(u64 from, u64 limit) {
        at = from & ~3ull, end = limit, used = 0;
        u32 skip = 8 * (u32)(from & 3);
        window = next() >> skip;
        held = 32 - skip;
        ahead = next();
    }
    __device__ void refill() {
        if (held <= 32) {
            window |= (u64)ahead << held;
            held += 32;
            ahead = next();
        }
    }
    __device__ u32 pair(const u16* table) {
        u32 entry = table[(u32)window & 4095], length = entry >> 8;
        window >>= length;
        held -= length;
        used += length;
        return entry & 255;
    }
};

DEVICE u32 sum_of_lower(u32 v, u32 l) {  // and its own, among 16 lanes
#pragma unroll
    for (u32 step = 1; step < 16; step <<= 1) {
        u32 below = __shfl_up_sync(kAll, v, step);
        if (l >= step) v += below;
    }
    return v;
}
// Bits 0 to 3 as bytes of 0 or 1.
DEVICE u32 spread(u32 nibble) { return nibble * 0x00204081u & 0x01010101u; }

// Copies a block to shared memory, whose address takes the place of the block's; what follows it in its slot may come
// along. By half a warp. Reading lanes from there takes a tenth of the time: each word waits for the one before.
DEVICE void fetch(u8* to, u64& from, u64& limit, u64 slot, u32 size, u32 l) {
    u64 last = from + size, first;
    if ((slot & 15) == 0 && ((last + 15) & ~15ull) <= limit) {
        first = from & ~15ull;
#pragma unroll 8
        for (u64 at = first + 16 * l; at < last; at += 256) *(uint4*)(to + (at - first)) = *pointer<const uint4>(at);
    } else {
        first = from & ~3ull;
        for (u64 at = first + 4 * l; at < last; at += 64) *(u32*)(to + (at - first)) = *pointer<const u32>(at);
    }
    from = (u64)to + (from - first);
    limit = (u64)to + ((last - first + 3) & ~3ull);
}

struct NoiseHalf {  // what half a warp works on
    const NoiseFrame& f;
    u32 index;        // of the block in the frame
    bool there;       // there is one
    bool refused;     // everything is NaN
};

// Decodes two blocks at once, one by each half of a warp. Returns whether the half's block is damaged; it is NaN then.
// `squares`: what this thread adds to the squares of means.
template <class F, int kWhat>
DEVICE bool decode_two(const Noise& a, NoiseDesk& desk, u32& loaded, const NoiseHalf& h, const NoisePart* first, const NoisePart* last,
                       double& squares) {
    u32 lane = lane_id(), l = lane % 16;
    const NoiseFrame& f = h.f;
    u64 start = (u64)h.index * kNoiseBlock;
    u32 values = !h.there ? 0 : f.values - start < kNoiseBlock ? (u32)(f.values - start) : kNoiseBlock;
    u32 rows = (values + kNoiseRow - 1) / kNoiseRow;
    u64 limit = f.slot + f.room;

    // The head of the block.
    u32 size = 0, number = 0, form = 0, base = 0, low = 0, planes = 0, count = 0, at = 4;
    u32 mask[2] = {kAll, kAll};
    u64 from = 0;
    bool bad = false, raw = false, coded = false;
    if (h.there && !h.refused) {
        size = half_at(f.slot + noise_index_offset(a, f) + 2 * (u64)h.index);
        from = f.slot + pointer<const u64>(a.offsets)[f.first_block + h.index];
        if (size && size < 4) bad = true;
        if (size <= kFetched) fetch(desk.block, from, limit, f.slot, size, l);
    }
    __syncwarp();
    if (h.there && !h.refused) {
        if (size >= 4) {
            u32 head = word_at(from);
            number = head & 255, form = head >> 8 & 255, base = head >> 16;
            if (number == kRawClass) {
                raw = true;
                bad = head >> 8 || size != 4 + 4 * values;
            } else bad = number >= kClasses || form >> 3 || (form & 3) == 3;
            coded = !raw;
        }
    }
    u32 width = form & 3, my_bytes = 0;
    if (coded && !bad) {
        bad = form & 4 && at + 8 > size;
        if (!bad && form & 4) {
            mask[0] = word_at(from + at), mask[1] = word_at(from + at + 4);
            at += 8;
        }
        u32 real[2] = {rows >= 32 ? kAll : (1u << rows) - 1, rows >= 64 ? kAll : rows > 32 ? (1u << (rows - 32)) - 1 : 0};
        if (form & 4) bad |= !(mask[0] | mask[1]) || mask[0] & ~real[0] || mask[1] & ~real[1];
        mask[0] &= real[0], mask[1] &= real[1];
        count = __popc(mask[0]) + __popc(mask[1]);
        low = low_bits_of(number);
        planes = at;
        at += 16 * low * count;
        bad |= at + (8u << width) > size;
        if (!bad) {
            u32 over = width == 0 ? byte_at(from + at + l / 2) >> 4 * (l & 1) & 15
                     : width == 1 ? byte_at(from + at + l) : half_at(from + at + 2 * l);
            my_bytes = base + over;
        }
        at += 8u << width;
    }
    u32 upto = sum_of_lower(my_bytes, l);
    u32 lists = at + __shfl_sync(kAll, upto, (int)(lane | 15));  // lanes begin at `at`
    if (coded && lists > size) bad = true;
    coded = coded && !bad;
    raw = raw && !bad;

    // Its table.
    u32 wanted = coded ? table_of(number) : loaded;
    if (any(wanted != loaded)) {
        __syncwarp();
        if (wanted != loaded) {
            const uint4* source = (const uint4*)noise_tables(a).decode[wanted];
#pragma unroll 8
            for (u32 i = l; i < 4096 * 2 / 16; i += 16) ((uint4*)desk.table)[i] = source[i];
        }
        loaded = wanted;
        __syncwarp();
    }

    int reach = coded ? (int)noise_tables(a).reaches[table_of(number)] : 0, half = (int)(1u << low >> 1);
    u32 most_rows = rows;
    {
        u32 other = __shfl_xor_sync(kAll, rows, 16);
        most_rows = other > rows ? other : rows;
    }
    u32 escapes_in_all = 0, giants_in_all = 0;
    bool active = h.there;  // in this pass
    for (u32 pass = 0; pass < 2; pass++) {  // giants come last: where they are is known when all else has been read
        NoiseWriter<F> writer(a, f, first, last, h.refused || !h.there);
        LaneReader bits;
        bits.held = bits.used = 0;
        if (coded) bits.open(from + at + upto - my_bytes, limit);
        u64 plane = from + planes + l;
        u32 escapes_seen = 0, giants_seen = 0;
        for (u32 row = 0; row < most_rows; row++) {
            bool here = active && coded && (row < 32 ? mask[0] >> row : mask[1] >> (row - 32)) & 1;
            u32 digits = 0, escapes = 0, lows[2] = {0, 0};
            if (here) {
                for (u32 b = 0; b < low; b++) {
                    u32 byte = byte_at(plane);
                    plane += 16;
                    lows[0] |= spread(byte & 15) << b;
                    lows[1] |= spread(byte >> 4) << b;
                }
                bits.refill();
                digits = bits.pair(desk.table);
                digits |= bits.pair(desk.table) << 8;
                bits.refill();
                digits |= bits.pair(desk.table) << 16;
                digits |= bits.pair(desk.table) << 24;
                u32 twice = digits & digits >> 1;
                escapes = twice & twice >> 2 & 0x11111111u;
            }
            float q[8];
            u32 which = pass == 0 ? 255 : 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int digit = (int)(digits >> 4 * j & 15), lowest = (int)(lows[j / 4] >> 8 * (j % 4) & 255);
                q[j] = here ? (float)(((digit - reach) << low) + lowest - half) : 0.0f;
            }
            if (any(escapes != 0)) {
                u32 mine = __popc(escapes), place = sum_of_lower(mine, l), giants = 0;
                u32 in_row = __shfl_sync(kAll, place, (int)(lane | 15));
                place = lists + escapes_seen + place - mine;
                escapes_seen += in_row;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (!(escapes >> 4 * j & 1)) continue;
                    bad |= place >= size;
                    int value = place < size ? (int)(i8)byte_at(from + place) : 0;
                    place++;
                    int lowest = (int)(lows[j / 4] >> 8 * (j % 4) & 255), whole = (value << low) + lowest - half;
                    if (value == -128) giants |= 1u << j;
                    else bad |= number < kWideClass && (whole > (int)kNarrowMost || whole < -(int)kNarrowMost);
                    q[j] = (float)whole;
                }
                if (any(giants != 0)) {
                    u32 mine = __popc(giants), rank = sum_of_lower(mine, l);
                    u32 in_row = __shfl_sync(kAll, rank, (int)(lane | 15));
                    rank = giants_seen + rank - mine;
                    giants_seen += in_row;
                    if (pass == 1) {
                        which = giants;
                        u32 list = lists + escapes_in_all;
#pragma unroll
                        for (int j = 0; j < 8; j++) {
                            if (!(giants >> j & 1)) continue;
                            q[j] = __uint_as_float(word_at(from + list + 4 * rank));
                            rank++;
                        }
                    } else which &= ~giants;
                }
            }
            u32 in_block = row * kNoiseRow + 8 * l;
            if (raw && active && in_block < values)
#pragma unroll
                for (int j = 0; j < 8; j++) q[j] = __uint_as_float(word_at(from + 4 + 4 * (in_block + (u32)j)));
            if (active && in_block < values && which) writer.template put<kWhat>(start + in_block, q, which);
        }
        squares = squares + writer.squares;
        if (pass == 1) break;
        escapes_in_all = escapes_seen, giants_in_all = giants_seen;
        if (coded) bad |= size - lists != escapes_in_all + 4 * giants_in_all || (bits.used + 7) / 8 != my_bytes;
        u32 halves = __ballot_sync(kAll, bad);
        bad = (lane < 16 ? halves & 0xffff : halves >> 16) != 0;
        active = active && coded && giants_in_all && !bad;
        if (!any(active)) break;
    }
    if (any(bad)) {
        NoiseWriter<F> writer(a, f, first, last, true);
        float q[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (bad && h.there)
            for (u32 in_block = 8 * l; in_block < values; in_block += kNoiseRow) writer.template put<kWhat>(start + in_block, q, 255);
        squares = squares + writer.squares;
    }
    __syncwarp();  // the next block takes this one's place
    return bad;
}

DEVICE void tell_damage(const Noise& a, u32 frame, bool bad) {
    if (bad && lane_id() % 16 == 0) atomicOr(pointer<u32>(a.status) + frame, (u32)kNoiseBlocks);
}

// Frames of sums become means.
template <class F>
DEVICE void noise_decode(const Args& args) {
    __shared__ NoiseDesk desks[2];
    const Noise& a = noise_args(args);
    u32 which = lane_id() / 16, loaded = ~0u;
    for (u32 pair = blockIdx.x; 2 * pair < a.all_blocks; pair += gridDim.x) {
        u32 block = 2 * pair + which;
        bool there = block < a.all_blocks;
        uint2 entry = pointer<const uint2>(a.blocks)[there ? block : 2 * pair];
        const NoiseFrame& f = pointer<const NoiseFrame>(a.frames)[entry.x];
        NoiseHalf h = {f, block - f.first_block, there && block - f.first_block < f.blocks,
                       pointer<const u32>(a.verdicts)[entry.x] != kFine};
        const NoisePart* parts = pointer<const NoisePart>(a.parts);
        double squares = 0.0;
        bool bad = decode_two<F, kMeans>(a, desks[which], loaded, h, parts + entry.y, parts + f.first_part + f.parts, squares);
        tell_damage(a, entry.x, bad);
        if (a.squares) {
            for (int step = 8; step; step >>= 1) squares = squares + shuffled_double(squares, step);
            if (there && lane_id() % 16 == 0) pointer<double>(a.squares)[block] = squares;
        }
    }
}

// What all ranks sent of this owner's parts is added up in rank order; its own values as they are. All frames have the
// same blocks, and `blocks` lists those of one.
template <class F>
DEVICE void noise_add(const Args& args) {
    __shared__ NoiseDesk desks[2];
    const Noise& a = noise_args(args);
    u32 which = lane_id() / 16, l = lane_id() % 16, loaded = ~0u;
    const NoiseFrame* frames = pointer<const NoiseFrame>(a.frames);
    const NoisePart *sums = pointer<const NoisePart>(a.sums), *parts = pointer<const NoisePart>(a.parts);
    for (u32 pair = blockIdx.x; 2 * pair < a.all_blocks; pair += gridDim.x) {
        u32 block = 2 * pair + which;
        bool there = block < frames[0].blocks;
        u32 first = pointer<const uint2>(a.blocks)[there ? block : 2 * pair].y;
        for (u32 rank = 0; rank < a.world; rank++) {
            const NoiseFrame& f = frames[rank];
            if (rank != a.rank) {
                NoiseHalf h = {f, block, there, pointer<const u32>(a.verdicts)[rank] != kFine};
                bool bad;
                double none = 0.0;
                if (rank == 0) bad = decode_two<Float32, kFirst>(a, desks[which], loaded, h, sums + first, sums + f.parts, none);
                else bad = decode_two<Float32, kAdded>(a, desks[which], loaded, h, sums + first, sums + f.parts, none);
                tell_damage(a, rank, bad);
                continue;
            }
            if (!there) continue;
            u64 end = (u64)(block + 1) * kNoiseBlock < f.values ? (u64)(block + 1) * kNoiseBlock : f.values;
            u32 number = first;
            for (u64 at = (u64)block * kNoiseBlock + 8 * l; at < end; at += kNoiseRow) {
                while (number + 1 < f.parts && at >= sums[number + 1].place) number++;
                u64 i = at - sums[number].place, length = sums[number].length;
                for (u64 j = i; j < i + 8 && j < length; j++) {
                    float x = Values<F>::load(parts[f.first_part + number].values, j);
                    float* sum_of = pointer<float>(sums[number].values) + j;
                    *sum_of = rank == 0 ? x : __fadd_rn(*sum_of, x);
                }
            }
        }
    }
}
