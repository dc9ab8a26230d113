// Encoding: a group of 128 threads codes a block (noise_encode). Groups tell each other how large their blocks are, so
// that each finds its place in the frame and goes there at once. The last group of a frame writes the frame's head; a
// frame that does not fit its slot is measured at all coarser levels (noise_coarsen), and coded again (noise_place), as
// are blocks that shared memory has no room for. Those two mostly have nothing to do.
//
// Rounding goes by rows, 4 values a thread, 16 rows a warp. Coding goes by lanes: a thread has 8 rows of a lane, so what
// it writes is one string of bits.

constexpr u32 kEncoders = 128, kWarps = 4, kWarpRows = kNoiseRows / kWarps;
constexpr u32 kBefore = 16;  // bytes: planes begin there in `out`; the block's head and mask end there
constexpr u32 kMostPlanes = 3 * 16 * kNoiseRows;                 // bytes of planes, but for wide classes
constexpr u32 kSmallOut = kBefore + kMostPlanes + kNoiseBlock;   // a block that is coded once
constexpr u32 kLargeOut = kBefore + 4 * kNoiseBlock + 32;
constexpr u32 kOnes = 0x01010101u;
constexpr u32 kCutHigh = kNarrowMost + 129;  // in wide classes, a byte that stands for all higher ones too

template <u32 kOut>
struct NoiseRoom {
    static constexpr bool kLarge = kOut == kLargeOut;
    __align__(16) u32 out[(kOut + 15) / 16 * 4];
    u32 escaped[kNoiseBlock / 32], giant[kNoiseBlock / 32];  // a bit for each value
    u16 escapes_before[kNoiseBlock / 32], giants_before[kNoiseBlock / 32];
    u32 table[256];
    u32 bits[8][kNoiseLanes];
    NoiseFrame frame;  // here rather than in registers, which are short
    u64 place;         // of the block in it
    u32 per_warp[kWarps];
    u32 sum, giants, rows[2], last, block;

    // Integers + 128 as bytes; 0 is a giant. In wide classes, what is left without low bits. They lie behind planes, where
    // lanes may come when all of them are coded.
    __device__ u32* integers() { return out + sizeof(out) / 4 - kNoiseBlock / 4; }
};

// --- From values to integers -------------------------------------------------------------------------------------------

// A thread's way through the parts of a frame; places only grow.
template <class F>
struct NoiseReader {
    const Noise& a;
    const NoisePart *part, *end;
    float factor;  // of the notch; 0: none
    u64 place, length, next, values;
    const i8* shape;
    float inverse;
    u32 k0, k1, index;

    __device__ NoiseReader(const Noise& args, const NoiseFrame& f, u32 first_part, u32 notch)
        : a(args), part(pointer<const NoisePart>(args.parts) + first_part),
          end(pointer<const NoisePart>(args.parts) + f.first_part + f.parts),
          factor(notch ? noise_tables(args).notches[notch] : 0.0f) {
        open();
    }
    __device__ void open() {
        NoisePart p = *part;
        place = p.place, values = p.values;
        next = part + 1 < end ? part[1].place : ~0ull;
        shape = pointer<const i8>(p.shape);
        float2 level = __ldcg(pointer<const float2>(a.levels) + p.level);
        if (factor != 0.0f) level.y = reciprocal(coarser(level.x, factor));
        inverse = level.y;
        length = inverse == 0.0f ? 0 : p.length;  // a level of 0 or NaN: all integers are 0
        k0 = mix32((u32)p.key ^ mix32(a.step));
        k1 = mix32((u32)(p.key >> 32) + a.step * 0x9e3779b9u) + a.offset;
        index = (u32)p.start;
    }
    __device__ void seek(u64 at) {
        while (at >= next) {
            part++;
            open();
        }
    }
    // Four values at a place, zeros where there are none; and twos to the power of -d.
    __device__ void four(u64 at, float* x, float* power) {
        seek(at);
        u64 i = at - place;
#pragma unroll
        for (int j = 0; j < 4; j++) power[j] = 1.0f;
        if (i + 4 <= length) {
            Values<F>::load_four(values, i, x);
            if (shape)
#pragma unroll
                for (int j = 0; j < 4; j++) power[j] = power_of_two(-shape[i + j]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool here = i + j < length;
                x[j] = here ? Values<F>::load(values, i + j) : 0.0f;
                if (here && shape) power[j] = power_of_two(-shape[i + j]);
            }
        }
    }
    __device__ u32 draw(u64 at, int j) const { return (mix32((index + (u32)(at - place) + (u32)j) ^ k0) + k1) >> 8; }
    // An integer of at most 119 with 128 added; 0 for others.
    __device__ u32 narrow(float x, float power, u32 h24) const {
        float t = __fmul_rn(__fmul_rn(x, inverse), power);
        t = fminf(fmaxf(t, -1024.0f), 1024.0f);  // NaN too
        float k = floorf(t);
        int r = (int)__fmul_rn(__fsub_rn(t, k), 16777216.0f);
        int q = (int)k + (int)(((u32)r + h24) >> 24);
        return (u32)(q + (int)kNarrowMost) <= 2 * kNarrowMost ? (u32)(q + 128) : 0;
    }
    // Any integer, as the format has it.
    __device__ float full(float x, float power, u32 h24) const {
        float t = __fmul_rn(__fmul_rn(x, inverse), power);
        if (is_nan(t)) return __uint_as_float(kCanonicalNan);
        if (!is_finite_float(t)) return t;
        float k = floorf(t);
        int r = (int)__fmul_rn(__fsub_rn(t, k), 16777216.0f);
        float q = __fadd_rn(k, (float)(((u32)r + h24) >> 24));
        return q == 0.0f ? 0.0f : q;
    }
    __device__ float full_at(u64 at) {
        while (at >= next) part++, next = part + 1 < end ? part[1].place : ~0ull;
        open();
        u64 i = at - place;
        if (i >= length) return 0.0f;
        return full(Values<F>::load(values, i), shape ? power_of_two(-shape[i]) : 1.0f, draw(at, 0));
    }
};

// The same for values that lie in one part, all of them there, at even addresses: what most of a message is.
//
// Integers are cut from fixed-point numbers with 24 places. t = x s 2^24 is rounded like x s, and the format's k 2^24 + r
// is the integer part of t; where t < 0, its rounding to nearest, which adding 2^24 gives. Draws of four values share
// the beginning, for only the lowest bits of their indices differ.
constexpr float kOne = 16777216.0f;               // 2^24
constexpr float kSteadyMost = 119.0f * kOne;      // below it no value is a giant
constexpr float kSteadyScale = 4.951760157e27f;   // 2^92: scales below it, times 2^36, are finite

template <class F>
struct SteadyReader {
    u64 values;  // address of this thread's first four
    const i8* shape;
    float scale;
    u32 k0, k1, index;

    // Whether `count` values from a place on are such ones; their reader then.
    __device__ bool open(const NoiseReader<F>& r, u64 at, u32 count) {
        u64 i = at - r.place;
        index = r.index + (u32)i + 4 * lane_id();
        values = r.values + (i + 4 * lane_id()) * F::kItem;
        shape = r.shape ? r.shape + i + 4 * lane_id() : 0;
        scale = __fmul_rn(r.inverse, kOne), k0 = r.k0, k1 = r.k1;
        return at + count <= r.next && i + count <= r.length && r.inverse < kSteadyScale && ((r.index + (u32)i) & 3) == 0 &&
               (((u32)r.values + (u32)i * F::kItem) & (4 * F::kItem - 1)) == 0;
    }
    // Four integers as bytes. `far`: one of them may be a giant, and they say nothing.
    template <bool kShaped>
    __device__ u32 four(const float* x, u32 row, bool& far) const {
        u32 first = (index + row * kNoiseRow) ^ k0, byte[4];
        first ^= first >> 16;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float s = kShaped ? __fmul_rn(scale, power_of_two(-shape[row * kNoiseRow + j])) : scale;
            float t = __fmul_rn(x[j], s);
            far |= !(fabsf(t) < kSteadyMost);
            float below = __saturatef(__fmul_rn(t, -1.7014118e38f));  // 1 where t < 0
            int fixed = __float2int_rz(__fmaf_rn(below, -kOne, __fmaf_rn(below, kOne, t)));
            u32 h = (first ^ j) * 0x7feb352du;
            h = (h ^ h >> 15) * 0x846ca68bu;
            h = (h ^ h >> 16) + k1;
            byte[j] = (u32)fixed + (h >> 8);
        }
        return __byte_perm(__byte_perm(byte[0], byte[1], 0x73), __byte_perm(byte[2], byte[3], 0x73), 0x5410) ^ 0x80808080u;
    }
};

DEVICE u32 magnitudes(u32 four, u32 sum) {
#if defined(__CUDA_ARCH__)
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(sum) : "r"(four), "r"(0x80808080u), "r"(sum));
    return sum;
#else
    for (int j = 0; j < 4; j++) {
        int d = (int)(four >> 8 * j & 255) - 128;
        sum += (u32)(d < 0 ? -d : d);
    }
    return sum;
#endif
}
DEVICE u32 zero_bytes(u32 w) { return ~(((w & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w | 0x7f7f7f7fu); }  // bit 7 of each

DEVICE u32 class_of(const Noise& a, u64 sum, u32 values) {
    const u32* thresholds = noise_tables(a).thresholds;
    u32 number = 0;
#pragma unroll
    for (u32 turn = 0; turn < 2; turn++) {
        u32 at = lane_id() + 32 * turn;
        number += __popc(__ballot_sync(kAll, at < kClasses - 1 && 256 * sum >= (u64)thresholds[at] * values));
    }
    return number;
}

// Counts the bits before each word of a bitmap of 256 words; all of them. By all threads.
template <class R>
DEVICE u32 count_before(R& room, const u32* words, u16* before) {
    u32 at = 2 * threadIdx.x, first = __popc(words[at]), both = first + __popc(words[at + 1]);
    u32 upto = running_sum(both);
    if (lane_id() == 31) room.per_warp[threadIdx.x / 32] = upto;
    __syncthreads();
    u32 lower = 0, all = 0;
    for (u32 w = 0; w < kWarps; w++) {
        if (w < threadIdx.x / 32) lower += room.per_warp[w];
        all += room.per_warp[w];
    }
    before[at] = (u16)(lower + upto - both);
    before[at + 1] = (u16)(lower + upto - both + first);
    __syncthreads();
    return all;
}

// --- One block ---------------------------------------------------------------------------------------------------------

struct NoiseBlock {
    u64 start;       // its first value in the frame's sequence
    u32 values;      // a multiple of 32
    u32 first_part;
};

struct Coded {
    u32 bytes;
    u32 first;  // byte of `out` where it begins
    bool raw, wide;
};

template <class R>
DEVICE void put_byte(R& room, u32 at, u32 byte) { atomicOr(room.out + at / 4, byte << 8 * (at & 3)); }

// What a warp has found out about its rows of a block.
struct Rounded {
    u32 sum, giants, rows;  // of magnitudes; a bit for each row that is not all 0
};

DEVICE void count_word(Rounded& found, u32 word, u32 row) {
    found.sum = magnitudes(word, found.sum);
    if (word != 0x80808080u) found.rows |= 1u << row;
}

// The integers of values in one part, 16 rows by a warp. Returns false where one may be a giant.
template <bool kShaped, class F>
DEVICE bool round_steadily(const SteadyReader<F>& reader, u32* q, Rounded& found) {
    constexpr u32 kTogether = 4;  // rows whose loads are under way at once
    bool far = false;
#pragma unroll 1
    for (u32 row = 0; row < kWarpRows; row += kTogether) {
        float x[kTogether][4];
#pragma unroll
        for (u32 k = 0; k < kTogether; k++) Values<F>::load_even(reader.values, (row + k) * kNoiseRow, x[k]);
#pragma unroll
        for (u32 k = 0; k < kTogether; k++) {
            u32 word = reader.template four<kShaped>(x[k], row + k, far);
            q[(row + k) * 32] = word;
            count_word(found, word, row + k);
        }
    }
    return !any(far);
}

// The integers of 16 rows, by a warp; `q`: this thread's word of the first one. The block has `rows` of them.
template <class F>
DEVICE Rounded round_rows(const Noise& a, const NoiseFrame& f, const NoiseBlock& b, u32 notch, u32 rows, u32* q) {
    u32 first = kWarpRows * (threadIdx.x / 32), lane = lane_id();
    Rounded found = {0, 0, 0};
    if (first >= rows) return found;
    u64 at = b.start + first * kNoiseRow;
    NoiseReader<F> reader(a, f, b.first_part, notch);
    reader.seek(at);
    SteadyReader<F> steady;
    if (first + kWarpRows <= rows && steady.open(reader, at, kWarpRows * kNoiseRow)) {
        if (steady.shape ? round_steadily<true>(steady, q, found) : round_steadily<false>(steady, q, found)) return found;
        found = {0, 0, 0};
    }
#pragma unroll 1
    for (u32 row = 0; row < kWarpRows && first + row < rows; row++) {
        float x[4], power[4];
        u64 here = at + row * kNoiseRow + 4 * lane;
        reader.four(here, x, power);
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) word |= reader.narrow(x[j], power[j], reader.draw(here, j)) << 8 * j;
        q[row * 32] = word;
        count_word(found, word, row);
        found.giants += __popc(zero_bytes(word));
    }
    return found;
}

// What is left of an integer without its low bits. Returns false for a giant.
DEVICE bool without_low_bits(float q, u32 number, u32 low, int& h, u32& lows) {
    bool fits = fabsf(q) <= (number < kWideClass ? (float)kNarrowMost : 32767.0f);
    int whole = (fits ? (int)q : 40000) + (int)(1u << low >> 1);
    h = whole >> low;
    bool fine = fits && h <= 127 && h >= -127;
    lows = fine ? (u32)whole & ((1u << low) - 1) : 0;
    return fine;
}

// A class of integers of up to 15 bits: from their sum; then what is left of them without the low bits, which are written
// where there is room. By all threads, `coded` of whose rows are.
template <class F, class R>
DEVICE u32 round_wide(const Noise& a, R& room, const NoiseFrame& f, const NoiseBlock& b, u32 notch, u32 number, const u32* mask) {
    u32 rows = (b.values + kNoiseRow - 1) / kNoiseRow, lane = lane_id();
    u32 count = __popc(mask[0]) + __popc(mask[1]);
    for (u32 turn = 0; turn < 2; turn++) {
        if (threadIdx.x == 0) room.sum = room.giants = 0;
        __syncthreads();
        NoiseReader<F> reader(a, f, b.first_part, notch);
        u32 sum_of = 0, giants = 0, low = low_bits_of(number);
        for (u32 row = threadIdx.x / 32; row < rows; row += kWarps) {
            u64 at = b.start + row * kNoiseRow + 4 * lane;
            float x[4], power[4];
            reader.four(at, x, power);
            u32 word = 0, lows[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float q = reader.full(x[j], power[j], reader.draw(at, j));
                sum_of += fabsf(q) <= 32767.0f ? (u32)fabsf(q) : 32768;
                int h;
                bool fine = without_low_bits(q, number, low, h, lows[j]);
                giants += !fine;
                word |= (fine ? min_u32((u32)(h + 128), kCutHigh) : 0) << 8 * j;
            }
            if (turn == 0) continue;
            room.integers()[row * 32 + lane] = word;
            if (!R::kLarge) continue;
            bool here = (row < 32 ? mask[0] >> row : mask[1] >> (row - 32)) & 1;
            u32 before = row < 32 ? __popc(mask[0] & ((1u << row) - 1))
                                  : __popc(mask[0]) + __popc(mask[1] & ((1u << (row - 32)) - 1));
            for (u32 bit = 0; bit < low; bit++) {
                u32 byte = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) byte |= (lows[j] >> bit & 1) << j;
                byte |= __shfl_xor_sync(kAll, byte, 1) << 4;
                if (here && lane % 2 == 0) ((u8*)room.out)[kBefore + (before * low + bit) * 16 + lane / 2] = (u8)byte;
            }
        }
        sum_of = sum(sum_of), giants = sum(giants);
        if (lane == 0) {
            atomicAdd(&room.sum, sum_of);
            atomicAdd(&room.giants, giants);
        }
        __syncthreads();
        if (turn == 0) {
            number = class_of(a, room.sum, count * kNoiseRow);
            if (number < kWideClass) number = kWideClass;
            __syncthreads();
        }
    }
    return number;
}

// How the bytes of a block become digits.
struct Digits {
    u32 shift, half, keep, zero, lift, beyond;
    bool wide;

    __device__ Digits(u32 number, u32 reach) {
        wide = number >= kWideClass;
        shift = wide ? 0 : low_bits_of(number);
        half = (1u << shift >> 1) * kOnes, keep = (255u >> shift) * kOnes, zero = 128u >> shift;
        lift = (reach + 128 - zero) * kOnes, beyond = (0x7f - 2 * reach) * kOnes;
    }
    // Integers without low bits, `zero` added, as bytes; 0 is a giant.
    __device__ u32 high(u32 four) const { return (four + half) >> shift & keep; }
    // Of those, digits as bytes; none is so large that one overflows.
    __device__ u32 of(u32 high) const {
        u32 v = high + lift, over = (((v & 0x7f7f7f7fu) + 0x70707070u) | ~v) & 0x80808080u;  // above 15, or below 0
        return (v | (over - (over >> 7))) & 0x0f0f0f0fu;
    }
    // A 1 in each byte whose digit is an escape.
    __device__ u32 escaped(u32 digits) const { return ((digits + beyond) & 0x80808080u) >> 7; }
};

constexpr u32 kKept = 8;  // escapes that a thread keeps; of more it finds the integers again

// The codes of a thread: 8 rows of a lane.
struct Strings {
    u32 part[16];  // two for each row: up to 24 bits from bit 8 on, behind the length and a count of escapes from bit 5 on
    u32 bits;      // in all
    u32 escaped;   // a bit for each row that has an escape
};

// Codes 8 rows of a lane, of which `eight` are coded. `q`: its integers as bytes.
template <class R>
DEVICE void code_rows(R& room, const u32* q, u32 eight, const Digits& digits, Strings& found) {
    found.bits = found.escaped = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        uint2 words = *(const uint2*)(q + 32 * i);
        u32 four[2] = {words.x, words.y}, here = 0u - (eight >> i & 1);
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 d = digits.of(digits.high(four[j]));
            d |= d >> 4;
            u32 one = room.table[d & 255], two = room.table[d >> 16 & 255];
            u32 string = one + (two & 255) + __funnelshift_l(0, two & ~255u, one);
            found.part[2 * i + j] = string & here;
            found.bits += string & here & 31;
        }
        if ((found.part[2 * i] | found.part[2 * i + 1]) & 0xe0) found.escaped |= 1u << i;
    }
}

// The escapes of a thread.
struct Escapes {
    u64 where;  // a bit for each value
    u64 kept;   // bytes of the first kKept
};

// Finds them in the rows that have some; `to`: the lane's bits in the first of 8 rows.
DEVICE Escapes find_escapes(const u32* q, u32 rows, const Digits& digits, u8* to) {
    Escapes found = {0, 0};
    u32 count = 0;
#pragma unroll 1
    for (; rows; rows &= rows - 1) {
        u32 row = (u32)__ffs((int)rows) - 1, bits = 0;
#pragma unroll 1
        for (u32 j = 0; j < 2; j++) {
            u32 four = q[32 * row + j], high = digits.high(four), escaped = digits.escaped(digits.of(high));
            bits |= (escaped * 0x01020408u >> 24 & 15) << 4 * j;
            for (; escaped; escaped &= escaped - 1, count++) {
                u32 at = (u32)__ffs((int)escaped) - 1;
                u32 whole = four >> at & 255;
                bool known = whole != 0 && whole != kCutHigh;  // else 128, the byte of giants, has it looked at again
                u32 byte = known ? ((high >> at & 255) - digits.zero) & 255 : 128;
                if (count < kKept) found.kept |= (u64)byte << 8 * count;
            }
        }
        found.where |= (u64)bits << 8 * row;
        to[row * kNoiseLanes] = (u8)bits;
    }
    return found;
}

// The low bits of 8 rows of a lane.
DEVICE void write_planes(u8* to, const u32* q, u32 eight, u32 low, bool giants) {
    u32 half = (1u << low >> 1) * kOnes;
#pragma unroll 2
    for (u32 i = 0; i < 8; i++) {
        uint2 words = *(const uint2*)(q + 32 * i);
        u32 one = words.x + half, two = words.y + half;
        if (giants) {
            one &= ~(zero_bytes(words.x) / 128 * 255);
            two &= ~(zero_bytes(words.y) / 128 * 255);
        }
        u32 both = choose(0x0f0f0f0fu, one, two << 4);
        if (eight >> i & 1)
            for (u32 bit = 0; bit < low; bit++, to += 16) *to = (u8)((both >> bit & 0x11111111u) * 0x01020408u >> 24);
    }
}

// Codes a block; where it has at most `most` bytes, into room.out. A raw one is not written.
template <class F, class R>
DEVICE Coded code_block(const Noise& a, R& room, const NoiseFrame& f, const NoiseBlock& b, u32 notch, u32 most) {
    u32 t = threadIdx.x, lane = lane_id(), warp = t / 32;
    u32 rows = (b.values + kNoiseRow - 1) / kNoiseRow;
    if (t == 0) room.sum = room.giants = room.rows[0] = room.rows[1] = 0;
    for (u32 at = t; at < kNoiseBlock / 32; at += kEncoders) room.escaped[at] = 0;
    __syncthreads();
    {
        Rounded found = round_rows<F>(a, f, b, notch, rows, room.integers() + kWarpRows * warp * 32 + lane);
        u32 sum_of = sum(found.sum), giants = sum(found.giants), coded = or_of(found.rows);
        if (lane == 0) {
            atomicAdd(&room.sum, sum_of);
            if (giants) atomicAdd(&room.giants, giants);
            atomicOr(&room.rows[warp / 2], coded << warp % 2 * 16);
        }
    }
    __syncthreads();
    u32 mask[2] = {room.rows[0], room.rows[1]};
    u32 count = __popc(mask[0]) + __popc(mask[1]);
    if (count == 0) return {0, kBefore, false, false};
    bool masked = rows - count >= 2;
    if (!masked) {
        count = rows;
        mask[0] = rows >= 32 ? kAll : (1u << rows) - 1;
        mask[1] = rows >= 64 ? kAll : rows > 32 ? (1u << (rows - 32)) - 1 : 0;
    }
    u32 number = class_of(a, room.sum, count * kNoiseRow);
    bool wide = number >= kWideClass;
    if (wide) {
        __syncthreads();  // all have read `sum`
        number = round_wide<F>(a, room, f, b, notch, number, mask);
    }

    u32 low = low_bits_of(number), planes = 16 * low * count;
    u32 l = lane / 2, g = 2 * warp + lane % 2;  // this thread's lane, and which 8 of its rows
    u32 eight = (g < 4 ? mask[0] >> 8 * g : mask[1] >> 8 * (g - 4)) & 255;  // which of them are coded
    const u32* q = room.integers() + 8 * g * 32 + 2 * l;
    {
        const u32* from = noise_tables(a).encode[table_of(number)];
        room.table[t] = from[t];
        room.table[t + kEncoders] = from[t + kEncoders];
    }
    Digits digits(number, noise_tables(a).reaches[table_of(number)]);
    bool giants = room.giants != 0;
    __syncthreads();

    if (low && !wide) {
        u32 rank = g < 4 ? __popc(mask[0] & ((1u << 8 * g) - 1)) : __popc(mask[0]) + __popc(mask[1] & ((1u << 8 * (g - 4)) - 1));
        write_planes((u8*)room.out + kBefore + 16 * low * rank + l, q, eight, low, giants);
    }
    Strings strings;
    code_rows(room, q, eight, digits, strings);
    Escapes mine = find_escapes(q, strings.escaped, digits, (u8*)room.escaped + 8 * g * kNoiseLanes + l);
    room.bits[g][l] = strings.bits;
    __syncthreads();

    // Where everything goes.
    u32 all_bits = 0, before = 0;
#pragma unroll
    for (u32 other = 0; other < 8; other++) {
        u32 bits = room.bits[other][l];
        all_bits += bits;
        before += other < g ? bits : 0;
    }
    u32 bytes = (all_bits + 7) / 8, upto = bytes, least = bytes, largest = bytes;
#pragma unroll
    for (u32 step = 1; step < 16; step <<= 1) {
        u32 below = __shfl_up_sync(kAll, upto, 2 * step);
        if (l >= step) upto += below;
        u32 other = __shfl_xor_sync(kAll, least, (int)(2 * step));
        least = other < least ? other : least;
        other = __shfl_xor_sync(kAll, largest, (int)(2 * step));
        largest = other > largest ? other : largest;
    }
    u32 lanes = __shfl_sync(kAll, upto, 31);
    u32 width = largest - least < 16 ? 0 : largest - least < 256 ? 1 : 2;
    u32 escapes = count_before(room, room.escaped, room.escapes_before);
    u32 head = 4 + (masked ? 8 : 0), lanes_at = kBefore + planes + (8u << width);
    u32 size = head + lanes_at - kBefore + lanes + escapes + 4 * room.giants;
    Coded coded = {size, kBefore - head, size >= 4 + 4 * b.values, wide};
    if (coded.raw) {
        coded.bytes = 4 + 4 * b.values;
        return coded;
    }
    if (size > most || (wide && !R::kLarge)) return coded;  // noise_place codes wide blocks

    // Lanes and what follows are put together with `or`.
    for (u32 at = (kBefore + planes) / 4 + t; 4 * at < coded.first + size; at += kEncoders) room.out[at] = 0;
    if (t < kBefore / 4) room.out[t] = 0;
    if (giants)
        for (u32 at = t; at < kNoiseBlock / 32; at += kEncoders) room.giant[at] = 0;
    __syncthreads();
    if (t < 32 && t % 2 == 0) {
        u32 bit = 8 * (kBefore + planes) + (4u << width) * l;
        u32 over = bytes - least;
        atomicOr(room.out + bit / 32, over << (bit & 31));
    }
    if (t == 32) {
        u32* to = room.out + (kBefore - head) / 4;
        to[0] = number | (width | (masked ? 4 : 0)) << 8 | least << 16;
        if (masked) to[1] = mask[0], to[2] = mask[1];
    }
    {
        u32 at = 8 * (lanes_at + upto - bytes) + before;
        u32* to = room.out + at / 32;
        u32 held = at & 31, word = 0;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            u32 string = strings.part[i] >> 8, rest = __funnelshift_l(string, 0, held);
            word |= string << held;
            held += strings.part[i] & 31;
            if (held >= 32) {
                atomicOr(to++, word);
                word = rest;
                held -= 32;
            }
        }
        if (held) atomicOr(to, word);
    }
    if (escapes) {
        u32 list = lanes_at + lanes;
        for (u32 turn = giants ? 0 : 1; turn < 2; turn++) {  // first where giants are
            u32 count = 0;
            for (u64 left = mine.where; left; left &= left - 1, count++) {
                u32 which = (u32)left ? (u32)__ffs((int)(u32)left) - 1 : 31 + (u32)__ffs((int)(u32)(left >> 32));
                u32 at = (8 * g + which / 8) * kNoiseRow + 8 * l + which % 8;  // in the block
                u32 word = at / 32, lower = (1u << at % 32) - 1, byte = (u32)(mine.kept >> 8 * count % 64) & 255;
                float full = 0.0f;
                if (count >= kKept || byte == 128) {
                    NoiseReader<F> reader(a, f, b.first_part, notch);
                    int h;
                    u32 lows;
                    full = reader.full_at(b.start + at);
                    byte = without_low_bits(full, number, low, h, lows) ? (u32)h & 255 : 128;
                }
                if (turn == 0) {
                    if (byte == 128) atomicOr(room.giant + word, 1u << at % 32);
                    continue;
                }
                put_byte(room, list + room.escapes_before[word] + __popc(room.escaped[word] & lower), byte);
                if (byte != 128) continue;
                u32 place = list + escapes + 4 * (room.giants_before[word] + __popc(room.giant[word] & lower));
                for (u32 j = 0; j < 4; j++) put_byte(room, place + j, __float_as_uint(full) >> 8 * j & 255);
            }
            if (turn == 0) {
                __syncthreads();
                count_before(room, room.giant, room.giants_before);
            }
        }
    }
    __syncthreads();
    return coded;
}

DEVICE NoiseBlock block_of(const Noise& a, const NoiseFrame& f, u32 block) {
    u64 start = (u64)(block - f.first_block) * kNoiseBlock;
    u64 left = f.values - start;
    return {start, (u32)(left < kNoiseBlock ? left : kNoiseBlock), pointer<const uint2>(a.blocks)[block].y};
}

// --- Frames ------------------------------------------------------------------------------------------------------------

DEVICE void put16(u64 at, u32 v) { *pointer<u16>(at) = (u16)v; }
DEVICE void put32(u64 at, u32 v) { *pointer<u32>(at) = v; }

DEVICE u64 noise_index_offset(const Noise& a, const NoiseFrame& f) { return a.prefix + kNoiseHead + 4 * (u64)f.parts; }
DEVICE u64 noise_blocks_offset(const Noise& a, const NoiseFrame& f) {
    return noise_index_offset(a, f) + (2 * (u64)f.blocks + 3) / 4 * 4;
}

// Writes a frame's head and levels; `total`: its bytes with all blocks. By all threads of one group.
DEVICE void write_head(const Noise& a, const NoiseFrame& f, u32 number, u32 notch, bool poisoned, u64 total) {
    u32 t = threadIdx.x;
    if (poisoned) total = a.prefix + kNoiseHead;
    else
        for (u32 at = t; at < f.parts; at += kEncoders) {
            const NoisePart& p = pointer<const NoisePart>(a.parts)[f.first_part + at];
            float level = __ldcg(pointer<const float2>(a.levels) + p.level).x;
            put32(f.slot + a.prefix + kNoiseHead + 4 * (u64)at, __float_as_uint(canonical(level)));
        }
    if (t != 0) return;
    if (!poisoned && f.blocks % 2) put16(f.slot + noise_index_offset(a, f) + 2 * (u64)f.blocks, 0);
    if (a.prefix) {
        u64 body = total - a.prefix;
        const u32 header[6] = {kFrameStart, 0, (u32)f.numel, (u32)(f.numel >> 32), (u32)body, (u32)(body >> 32)};
        for (u32 j = 0; j < 6; j++) put32(f.slot + 4 * j, header[j]);
    }
    put32(f.slot + a.prefix, f.parts);
    put32(f.slot + a.prefix + 4, notch | (poisoned ? 1u << 16 : 0));
    put32(f.slot + a.prefix + 8, a.step);
    put32(f.slot + a.prefix + 12, a.digest);
    NoiseResult& result = pointer<NoiseResult>(a.results)[number];
    result.bytes = total;
    result.notch = notch;
    result.poisoned = poisoned;
}

// Writes the index of a frame, and where its blocks begin; returns where they end. By all threads of one group.
template <class R, class Size>
DEVICE u64 write_index(const Noise& a, R& room, const NoiseFrame& f, Size size_of) {
    u32 t = threadIdx.x;
    u64 offset = noise_blocks_offset(a, f), index = f.slot + noise_index_offset(a, f);
    constexpr u32 kEach = 4;
    for (u32 first = 0; first < f.blocks; first += kEach * kEncoders) {
        u32 size[kEach], all = 0;
#pragma unroll
        for (u32 j = 0; j < kEach; j++) {
            u32 at = first + kEach * t + j;
            size[j] = at < f.blocks ? size_of(at) : 0;
            if (at < f.blocks) put16(index + 2 * (u64)at, size[j]);
            all += size[j];
        }
        u32 upto = running_sum(all), lower = 0, sum_of = 0;
        __syncthreads();
        if (lane_id() == 31) room.per_warp[t / 32] = upto;
        __syncthreads();
        for (u32 w = 0; w < kWarps; w++) {
            if (w < t / 32) lower += room.per_warp[w];
            sum_of += room.per_warp[w];
        }
        u64 begin = offset + lower + upto - all;
#pragma unroll
        for (u32 j = 0; j < kEach; j++) {
            u32 at = first + kEach * t + j;
            if (at < f.blocks) pointer<u64>(a.offsets)[f.first_block + at] = begin;
            begin += size[j];
        }
        offset += sum_of;
    }
    return offset;
}

// Whether this group is the last of `all` that come here for a frame. By all threads.
template <class R>
DEVICE bool is_last(R& room, u32* counter, u32 all) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        room.last = atomicAdd(counter, 1u) == all - 1;
        if (room.last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return room.last;
}

// The bytes of a frame's blocks. By all threads.
template <class R, class Size>
DEVICE u64 total_size(R& room, u32 blocks, Size size_of) {
    u64 mine = 0;
    for (u32 at = threadIdx.x; at < blocks; at += kEncoders) mine += size_of(at);
    for (int step = 16; step; step >>= 1) mine += __shfl_xor_sync(kAll, mine, step);
    __syncthreads();
    if (lane_id() == 0) room.per_warp[threadIdx.x / 32] = (u32)mine, room.bits[0][threadIdx.x / 32] = (u32)(mine >> 32);
    __syncthreads();
    u64 all = 0;
    for (u32 w = 0; w < kWarps; w++) all += room.per_warp[w] + ((u64)room.bits[0][w] << 32);
    return all;
}

// Copies bytes to any address. By `all` threads, of which this is number t.
DEVICE void copy_bytes(u64 to, const u32* from, u32 bytes, u32 t, u32 all) {
    u32 head = (u32)(0 - to) & 3;
    if (head > bytes) head = bytes;
    const u8* source = (const u8*)from;
    if (t < head) pointer<u8>(to)[t] = source[t];
    u32 words = (bytes - head) / 4;
    u32* out = pointer<u32>(to + head);
#pragma unroll 8
    for (u32 at = t; at < words; at += all) out[at] = __funnelshift_r(from[at], from[at + 1], 8 * head);
    u32 done = head + 4 * words;
    if (t < bytes - done) pointer<u8>(to + done)[t] = source[done + t];
}

// The integers of a block as floats, behind a head that says so. By all threads.
template <class F>
DEVICE void write_raw(const Noise& a, const NoiseFrame& f, const NoiseBlock& b, u32 notch, u64 to) {
    u8* out = pointer<u8>(to);
    if (threadIdx.x < 4) out[threadIdx.x] = threadIdx.x ? 0 : (u8)kRawClass;
    NoiseReader<F> reader(a, f, b.first_part, notch);
    for (u32 i = 4 * threadIdx.x; i < b.values; i += 4 * kEncoders) {
        float x[4], power[4];
        reader.four(b.start + i, x, power);
        for (int j = 0; j < 4; j++) {
            u32 bits = __float_as_uint(reader.full(x[j], power[j], reader.draw(b.start + i, j)));
            for (u32 k = 0; k < 4; k++) out[4 + 4 * (i + (u32)j) + k] = (u8)(bits >> 8 * k);
        }
    }
}

// --- Where a block goes ------------------------------------------------------------------------------------------------
// A word for each block: how many bytes it has, or where it ends in the frame, behind the number of the launch. All are
// written by every launch, so what an earlier one left there is known by its number.

constexpr u32 kPlaceBits = 40;
enum { kItsBytes = 1, kItsEnd = 2 };

DEVICE u64 progress_word(u32 launch, u32 what, u64 bytes) { return (u64)launch << (kPlaceBits + 2) | (u64)what << kPlaceBits | bytes; }
DEVICE u32 launch_number(const NoiseState& state) { return *(const volatile u32*)&state.launch & 0x3fffffu; }

// Where a block begins that is not its frame's first: behind all before it, of which some groups may still be at work.
// They have begun earlier. `words`: of the frame. By a warp.
DEVICE u64 place_of(const u64* words, u32 block, u32 launch) {
    u64 bytes = 0;
    for (u32 end = block;;) {
        u32 back = lane_id() + 1;
        u64 word = end >= back ? *(const volatile u64*)(words + end - back) : progress_word(launch, kItsBytes, 0);
        bool known = word >> (kPlaceBits + 2) == launch && (word >> kPlaceBits & 3);
        u32 all = __ballot_sync(kAll, known), ends = __ballot_sync(kAll, known && (word >> kPlaceBits & 3) == kItsEnd);
        u32 wanted = ends ? (ends & (0 - ends)) | ((ends & (0 - ends)) - 1) : kAll;  // lanes up to the nearest known end
        if ((all & wanted) != wanted) {
            let_others_run();
            continue;
        }
        u64 value = word & ((1ull << kPlaceBits) - 1);
        u32 nearest = 31 - (u32)__clz((int)wanted);
        bytes += sum(wanted >> lane_id() & 1 && !(ends && lane_id() == nearest) ? (u32)value : 0);
        if (ends) return bytes + __shfl_sync(kAll, value, (int)nearest);
        end -= 32;
    }
}

template <class F>
DEVICE void noise_encode(const Args& args) {
    __shared__ NoiseRoom<kSmallOut> room;
    const Noise& a = noise_args(args);
    NoiseState* states = pointer<NoiseState>(a.states);
    if (threadIdx.x == 0) {  // groups take blocks in order, so that none waits for one that has not begun
        room.block = atomicAdd(&states[0].ticket, 1u);
        if (room.block == gridDim.x - 1) states[0].ticket = 0;
        room.frame = pointer<const NoiseFrame>(a.frames)[pointer<const uint2>(a.blocks)[room.block].x];
    }
    __syncthreads();
    u32 block = room.block, number = pointer<const uint2>(a.blocks)[block].x;
    const NoiseFrame& f = room.frame;
    NoiseState& state = states[number];
    u64* words = pointer<u64>(a.progress) + f.first_block;
    u32 launch = launch_number(state), index = block - f.first_block;
    if (index < f.blocks) {
        Coded coded = code_block<F>(a, room, f, block_of(a, f, block), 0, kStageBytes);
        bool left = coded.raw || coded.wide || coded.bytes > kStageBytes;  // for noise_place
        if (threadIdx.x < 32) {
            u64 place = noise_blocks_offset(a, f);
            if (index) {
                if (lane_id() == 0) *(volatile u64*)(words + index) = progress_word(launch, kItsBytes, coded.bytes);
                place = place_of(words, index, launch);
            }
            if (lane_id() == 0) {
                *(volatile u64*)(words + index) = progress_word(launch, kItsEnd, place + coded.bytes);
                room.place = place;
                pointer<u32>(a.left)[block] = left;
                if (left) {
                    pointer<u64>(a.offsets)[block] = place;
                    *(volatile u32*)&state.left = 1;
                }
                put16(f.slot + noise_index_offset(a, f) + 2 * (u64)index, coded.bytes);
            }
        }
        __syncthreads();
        if (!left && room.place + coded.bytes <= f.room)
            copy_bytes(f.slot + room.place, room.out + coded.first / 4, coded.bytes, threadIdx.x, kEncoders);
    }
    if (!is_last(room, &state.done, f.blocks ? f.blocks : 1)) return;
    bool poisoned = false;
    for (u32 other = 0; other < a.poisonous; other++)
        poisoned |= other != a.rank && pointer<const u32>(a.verdicts)[other] != kFine;
    u64 total = f.blocks ? *(const volatile u64*)(words + f.blocks - 1) & ((1ull << kPlaceBits) - 1) : noise_blocks_offset(a, f);
    bool fits = poisoned || total <= f.room;
    if (fits) write_head(a, f, number, 0, poisoned, total);
    if (threadIdx.x == 0) {
        state.overflow = !fits;
        if (!fits || *(const volatile u32*)&state.left) *(volatile u32*)&states[0].again = launch + 1;
        state.left = 0;
        state.launch = launch + 1;
    }
}

// Whether a launch of noise_encode has left work for those that follow.
DEVICE bool has_more(const Noise& a) {
    const NoiseState& first = *pointer<const NoiseState>(a.states);
    return first.again == first.launch;
}

// Sizes at all coarser levels, for frames that do not fit; then the first that does.
template <class F>
DEVICE void noise_coarsen(const Args& args) {
    __shared__ NoiseRoom<kSmallOut> room;
    const Noise& a = noise_args(args);
    if (!has_more(a)) return;
    u16* retries = pointer<u16>(a.retries);
    for (u32 block = blockIdx.x; block < a.all_blocks; block += gridDim.x) {
        u32 number = pointer<const uint2>(a.blocks)[block].x;
        NoiseState& state = pointer<NoiseState>(a.states)[number];
        if (!*(volatile u32*)&state.overflow) continue;
        NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
        for (u32 candidate = 1; candidate < kCandidates; candidate++) {
            Coded coded = code_block<F>(a, room, f, block_of(a, f, block), notch_of(candidate), 0);
            if (threadIdx.x == 0) retries[(u64)candidate * a.all_blocks + block] = (u16)coded.bytes;
            __syncthreads();
        }
        if (!is_last(room, &state.retried, f.blocks ? f.blocks : 1)) continue;
        u32 candidate = 0;
        auto size_of = [&](u32 at) -> u32 { return __ldcg(retries + (u64)candidate * a.all_blocks + f.first_block + at); };
        for (candidate = 1; candidate < kCandidates; candidate++)
            if (noise_blocks_offset(a, f) + total_size(room, f.blocks, size_of) <= f.room) break;
        bool poisoned = candidate == kCandidates;
        u64 total = poisoned ? 0 : write_index(a, room, f, size_of);
        write_head(a, f, number, poisoned ? 0 : notch_of(candidate), poisoned, total);
        __syncthreads();
    }
}

// Blocks of coarser frames, and those that noise_encode had no room for.
template <class F>
DEVICE void noise_place(const Args& args) {
    __shared__ NoiseRoom<kLargeOut> room;
    const Noise& a = noise_args(args);
    if (!has_more(a)) return;
    for (u32 block = blockIdx.x; block < a.all_blocks; block += gridDim.x) {
        u32 number = pointer<const uint2>(a.blocks)[block].x;
        NoiseResult result = pointer<const NoiseResult>(a.results)[number];
        NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
        if (result.poisoned || block - f.first_block >= f.blocks) continue;
        if (!result.notch && !pointer<const u32>(a.left)[block]) continue;
        u64 to = f.slot + pointer<const u64>(a.offsets)[block];
        __syncthreads();
        Coded coded = code_block<F>(a, room, f, block_of(a, f, block), result.notch, ~0u >> 4);
        if (coded.raw) write_raw<F>(a, f, block_of(a, f, block), result.notch, to);
        else copy_bytes(to, room.out + coded.first / 4, coded.bytes, threadIdx.x, kEncoders);
    }
}
