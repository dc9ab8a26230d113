// Encoding: a group of 128 threads codes a block, first into scratch memory (noise_encode). The last group of a frame
// knows all sizes and writes the frame's head; a frame that does not fit its slot is measured at all coarser levels
// (noise_coarsen, which otherwise has nothing to do); noise_place puts blocks where they belong.
//
// Rounding goes by rows, 4 values a thread. Coding goes by lanes: thread t has the rows 8 (t / 16) to 8 (t / 16) + 7 of
// lane t mod 16, so what it writes is one string of bits.

constexpr u32 kEncoders = 128, kWarps = 4;
constexpr u32 kBefore = 16;  // bytes: planes begin there in `out`; the block's head and mask end there
constexpr u32 kSmallOut = kBefore + kStageBytes + 1200;   // a staged block, and lanes of one that turns out too large
constexpr u32 kLargeOut = kBefore + 4 * kNoiseBlock + 32;

template <u32 kOut>
struct NoiseRoom {
    __align__(16) u32 q[kNoiseBlock / 4];    // integers + 128 as bytes; 0 is a giant. In wide classes, what is left without low bits
    __align__(16) u32 out[(kOut + 15) / 16 * 4];
    u32 escaped[kNoiseBlock / 32], giant[kNoiseBlock / 32];  // a bit for each value
    u16 escapes_before[kNoiseBlock / 32], giants_before[kNoiseBlock / 32];
    u32 table[256];
    u32 bits[8][kNoiseLanes];
    u32 per_warp[kWarps];
    u32 sum, giants, rows[2], last;
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

// Codes a block; where it has at most `most` bytes, into room.out. A raw one is not written.
template <class F, class R>
DEVICE Coded code_block(const Noise& a, R& room, const NoiseFrame& f, const NoiseBlock& b, u32 notch, u32 most) {
    u32 t = threadIdx.x, lane = lane_id(), warp = t / 32;
    u32 rows = (b.values + kNoiseRow - 1) / kNoiseRow;
    if (t == 0) room.sum = room.giants = room.rows[0] = room.rows[1] = 0;
    __syncthreads();

    {   // integers
        NoiseReader<F> reader(a, f, b.first_part, notch);
        u32 sum_of = 0, giants = 0, coded[2] = {0, 0};
#pragma unroll 2
        for (u32 row = warp; row < rows; row += kWarps) {
            u64 at = b.start + row * kNoiseRow + 4 * lane;
            float x[4], power[4];
            reader.four(at, x, power);
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) word |= reader.narrow(x[j], power[j], reader.draw(at, j)) << 8 * j;
            room.q[row * 32 + lane] = word;
            sum_of = magnitudes(word, sum_of);
            giants += __popc(zero_bytes(word));
            bool found = any(word != 0x80808080u);
            coded[0] |= row < 32 && found ? 1u << row : 0;
            coded[1] |= row >= 32 && found ? 1u << (row - 32) : 0;
        }
        sum_of = sum(sum_of), giants = sum(giants);
        if (lane == 0) {
            atomicAdd(&room.sum, sum_of);
            if (giants) atomicAdd(&room.giants, giants);
            atomicOr(&room.rows[0], coded[0]);
            atomicOr(&room.rows[1], coded[1]);
        }
    }
    for (u32 at = t; at < kNoiseBlock / 32; at += kEncoders) room.escaped[at] = 0;
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
    __syncthreads();  // all have read `sum`

    if (wide) {  // integers of up to 15 bits: their sum, and then what is left of them without the low bits
        for (u32 turn = 0; turn < 2; turn++) {
            if (t == 0) room.sum = room.giants = 0;
            __syncthreads();
            NoiseReader<F> reader(a, f, b.first_part, notch);
            u32 sum_of = 0, giants = 0, low = low_bits_of(number), half = 1u << low >> 1;
            for (u32 row = warp; row < rows; row += kWarps) {
                u64 at = b.start + row * kNoiseRow + 4 * lane;
                float x[4], power[4];
                reader.four(at, x, power);
                u32 word = 0, lows[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float q = reader.full(x[j], power[j], reader.draw(at, j));
                    bool fits = fabsf(q) <= 32767.0f;
                    sum_of += fits ? (u32)fabsf(q) : 32768;
                    int whole = (fits ? (int)q : 40000) + (int)half;
                    int h = whole >> low;
                    bool fine = fits && h <= 127 && h >= -127;
                    giants += !fine;
                    word |= (fine ? (u32)(h + 128) : 0) << 8 * j;
                    lows[j] = fine ? (u32)whole & ((1u << low) - 1) : 0;
                }
                if (turn == 0) continue;
                room.q[row * 32 + lane] = word;
                bool here = (row < 32 ? mask[0] >> row : mask[1] >> (row - 32)) & 1;
                u32 before = row < 32 ? __popc(mask[0] & ((1u << row) - 1))
                                      : __popc(mask[0]) + __popc(mask[1] & ((1u << (row - 32)) - 1));
                for (u32 bit = 0; bit < low; bit++) {
                    u32 byte = 0;
#pragma unroll
                    for (int j = 0; j < 4; j++) byte |= (lows[j] >> bit & 1) << j;
                    byte |= __shfl_xor_sync(kAll, byte, 1) << 4;
                    u32 to = kBefore + (before * low + bit) * 16 + lane / 2;
                    if (here && lane % 2 == 0 && to < sizeof(room.out)) ((u8*)room.out)[to] = (u8)byte;
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
    }

    u32 low = low_bits_of(number), planes = 16 * low * count;
    u32 shift = wide ? 0 : low, half = wide ? 0 : 1u << low >> 1;
    {
        const u32* from = noise_tables(a).encode[table_of(number)];
        room.table[t] = from[t];
        room.table[t + kEncoders] = from[t + kEncoders];
    }
    __syncthreads();

    // Codes: two strings of up to 24 bits for each row, with their lengths from bit 24 on.
    u32 l = t % kNoiseLanes, g = t / kNoiseLanes;
    u32 reach = noise_tables(a).reaches[table_of(number)];
    int add = (int)(half + (reach << shift)) - 128;
    u32 strings[16], my_bits = 0;
    u64 my_escapes = 0;
    u32 eight = (g < 4 ? mask[0] >> 8 * g : mask[1] >> 8 * (g - 4)) & 255;  // which of its rows are coded
    u32 rank = g < 4 ? __popc(mask[0] & ((1u << 8 * g) - 1)) : __popc(mask[0]) + __popc(mask[1] & ((1u << 8 * (g - 4)) - 1));
    bool giants = room.giants != 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        strings[2 * i] = strings[2 * i + 1] = 0;
        if (!(eight >> i & 1)) continue;
        u32 row = 8 * g + i;
        uint2 words = *(const uint2*)(room.q + row * 32 + 2 * l);
        u32 found[2] = {words.x, words.y}, escapes = 0;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 w = found[j], digit[4];
#pragma unroll
            for (u32 v = 0; v < 4; v++) digit[v] = min_u32((u32)(((int)(w >> 8 * v & 255) + add) >> shift), 15);
            u32 one = room.table[digit[0] | digit[1] << 4], two = room.table[digit[2] | digit[3] << 4];
            u32 len = one >> 12 & 15, lens = len + (two >> 12 & 15);
            strings[2 * i + j] = (one & 4095) | (two & 4095) << len | lens << 24;
            my_bits += lens;
            escapes |= (one >> 16 | two >> 16 << 2) << 4 * j;
        }
        if (escapes) {
            ((u8*)room.escaped)[row * kNoiseLanes + l] = (u8)escapes;
            my_escapes |= (u64)escapes << 8 * i;
        }
        if (!wide) {
            for (u32 bit = 0; bit < low; bit++) {
                u32 byte = 0;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    u32 w = ((found[j] + half * 0x01010101u) >> bit) & 0x01010101u;
                    if (giants) w &= ~(zero_bytes(found[j]) >> 7);
                    byte |= (w * 0x01020408u >> 24) << 4 * j;
                }
                ((u8*)room.out)[kBefore + ((rank + __popc(eight & ((1u << i) - 1))) * low + bit) * 16 + l] = (u8)byte;
            }
        }
    }
    room.bits[g][l] = my_bits;
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
        u32 below = __shfl_up_sync(kAll, upto, step);
        if (l >= step) upto += below;
        u32 other = __shfl_xor_sync(kAll, least, (int)step);
        least = other < least ? other : least;
        other = __shfl_xor_sync(kAll, largest, (int)step);
        largest = other > largest ? other : largest;
    }
    u32 lanes = __shfl_sync(kAll, upto, 15);
    u32 width = largest - least < 16 ? 0 : largest - least < 256 ? 1 : 2;
    u32 escapes = count_before(room, room.escaped, room.escapes_before);
    u32 head = 4 + (masked ? 8 : 0), lanes_at = kBefore + planes + (8u << width);
    u32 size = head + lanes_at - kBefore + lanes + escapes + 4 * room.giants;
    Coded coded = {size, kBefore - head, size >= 4 + 4 * b.values, wide};
    if (coded.raw) {
        coded.bytes = 4 + 4 * b.values;
        return coded;
    }
    if (size > most) return coded;

    // Lanes and what follows are put together with `or`.
    for (u32 at = (kBefore + planes) / 4 + t; 4 * at < coded.first + size; at += kEncoders) room.out[at] = 0;
    if (t < kBefore / 4) room.out[t] = 0;
    __syncthreads();
    if (t < kNoiseLanes) {
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
        u32 held = at & 31;
        u64 string = 0;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            string |= (u64)(strings[i] & 0xffffff) << held;
            held += strings[i] >> 24;
            if (held >= 32) {
                atomicOr(to, (u32)string);
                to++;
                string >>= 32;
                held -= 32;
            }
        }
        if (held) atomicOr(to, (u32)string);
    }
    if (escapes) {
        u32 list = lanes_at + lanes;
        if (giants) {
            for (u32 at = t; at < kNoiseBlock / 32; at += kEncoders) {
                u32 both = 0;
                for (u32 j = 0; j < 8; j++) {
                    u32 z = room.escaped[at] >> 4 * j & 15 ? zero_bytes(room.q[at * 8 + j]) : 0;
                    both |= ((z >> 7) * 0x01020408u >> 24 & 15) << 4 * j;
                }
                room.giant[at] = both & room.escaped[at];
            }
            __syncthreads();
            count_before(room, room.giant, room.giants_before);
        }
        while (my_escapes) {
            u32 which = (u32)my_escapes ? (u32)__ffs((int)(u32)my_escapes) - 1 : 31 + (u32)__ffs((int)(u32)(my_escapes >> 32));
            my_escapes &= my_escapes - 1;
            u32 at = (8 * g + which / 8) * kNoiseRow + 8 * l + which % 8;  // in the block
            u32 word = at / 32, lower = (1u << at % 32) - 1;
            u32 place = room.escapes_before[word] + __popc(room.escaped[word] & lower);
            u32 q = ((const u8*)room.q)[at];
            put_byte(room, list + place, q ? (u32)(((int)(q + half) - 128) >> shift) & 255 : 128);
            if (q == 0) {
                place = room.giants_before[word] + __popc(room.giant[word] & lower);
                NoiseReader<F> reader(a, f, b.first_part, notch);
                u32 bits = __float_as_uint(reader.full_at(b.start + at));
                for (u32 j = 0; j < 4; j++) put_byte(room, list + escapes + 4 * place + j, bits >> 8 * j & 255);
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

// Writes a frame's head, levels and index, and where its blocks begin. By all threads of one group.
template <class R, class Size>
DEVICE void write_head(const Noise& a, R& room, const NoiseFrame& f, u32 number, u32 notch, bool poisoned, Size size_of) {
    u32 t = threadIdx.x;
    u64 offset = noise_blocks_offset(a, f), index = f.slot + noise_index_offset(a, f);
    if (!poisoned) {
        for (u32 at = t; at < f.parts; at += kEncoders) {
            const NoisePart& p = pointer<const NoisePart>(a.parts)[f.first_part + at];
            float level = __ldcg(pointer<const float2>(a.levels) + p.level).x;
            put32(f.slot + a.prefix + kNoiseHead + 4 * (u64)at, __float_as_uint(canonical(level)));
        }
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
        if (t == 0 && f.blocks % 2) put16(index + 2 * (u64)f.blocks, 0);
    }
    if (t == 0) {
        u64 total = poisoned ? a.prefix + kNoiseHead : offset;
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

template <class F>
DEVICE void noise_encode(const Args& args) {
    __shared__ NoiseRoom<kSmallOut> room;
    const Noise& a = noise_args(args);
    u32 block = blockIdx.x, number = pointer<const uint2>(a.blocks)[block].x;
    NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
    u32* sizes = pointer<u32>(a.sizes);
    if (block - f.first_block < f.blocks) {
        Coded coded = code_block<F>(a, room, f, block_of(a, f, block), 0, kStageBytes);
        bool staged = !coded.raw && !coded.wide && coded.bytes <= kStageBytes;
        if (staged) {
            u32* to = pointer<u32>(a.staging + (u64)block * kStageBytes);
            const u32* from = room.out + coded.first / 4;
            for (u32 at = threadIdx.x; 4 * at < coded.bytes; at += kEncoders) to[at] = from[at];
        }
        if (threadIdx.x == 0) sizes[block] = coded.bytes | (staged ? 1u << 31 : 0);
    }
    NoiseState& state = pointer<NoiseState>(a.states)[number];
    if (!is_last(room, &state.done, f.blocks ? f.blocks : 1)) return;
    auto size_of = [&](u32 at) { return __ldcg(sizes + f.first_block + at) & 0x7fffffffu; };
    bool poisoned = false;
    for (u32 other = 0; other < a.poisonous; other++)
        poisoned |= other != a.rank && pointer<const u32>(a.verdicts)[other] != kFine;
    bool fits = poisoned || noise_blocks_offset(a, f) + total_size(room, f.blocks, size_of) <= f.room;
    if (fits) write_head(a, room, f, number, 0, poisoned, size_of);
    if (threadIdx.x == 0) state.overflow = !fits;
}

// Sizes at all coarser levels, for frames that do not fit; then the first that does.
template <class F>
DEVICE void noise_coarsen(const Args& args) {
    __shared__ NoiseRoom<kSmallOut> room;
    const Noise& a = noise_args(args);
    u16* retries = pointer<u16>(a.retries);
    u32 seen = ~0u;
    bool overflow = false;
    for (u32 block = blockIdx.x; block < a.all_blocks; block += gridDim.x) {
        u32 number = pointer<const uint2>(a.blocks)[block].x;
        NoiseState& state = pointer<NoiseState>(a.states)[number];
        if (number != seen) overflow = *(volatile u32*)&state.overflow != 0;
        seen = number;
        if (!overflow) continue;
        NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
        for (u32 candidate = 1; candidate < kCandidates; candidate++) {
            Coded coded = code_block<F>(a, room, f, block_of(a, f, block), notch_of(candidate), 0);
            if (threadIdx.x == 0) retries[(u64)candidate * a.all_blocks + block] = (u16)coded.bytes;
            __syncthreads();
        }
        if (!is_last(room, &state.retried, f.blocks)) continue;
        u32 candidate = 0;
        auto size_of = [&](u32 at) -> u32 { return __ldcg(retries + (u64)candidate * a.all_blocks + f.first_block + at); };
        for (candidate = 1; candidate < kCandidates; candidate++)
            if (noise_blocks_offset(a, f) + total_size(room, f.blocks, size_of) <= f.room) break;
        bool poisoned = candidate == kCandidates;
        write_head(a, room, f, number, poisoned ? 0 : notch_of(candidate), poisoned, size_of);
        __syncthreads();
    }
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
    for (u32 at = t; at < words; at += all) out[at] = head ? __funnelshift_r(from[at], from[at + 1], 8 * head) : from[at];
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

// A warp for each block that was staged; the others are coded again by the whole group.
template <class F>
DEVICE void noise_place(const Args& args) {
    __shared__ NoiseRoom<kLargeOut> room;
    const Noise& a = noise_args(args);
    u32 first = blockIdx.x * kWarps, mine = first + threadIdx.x / 32, again = 0;
    for (u32 block = first; block < first + kWarps && block < a.all_blocks; block++) {
        u32 number = pointer<const uint2>(a.blocks)[block].x, size = pointer<const u32>(a.sizes)[block];
        const NoiseFrame& f = pointer<const NoiseFrame>(a.frames)[number];
        NoiseResult result = pointer<const NoiseResult>(a.results)[number];
        if (result.poisoned || block - f.first_block >= f.blocks || (result.notch == 0 && size == 0)) continue;
        if (result.notch || !(size >> 31)) again |= 1u << (block - first);
        else if (block == mine)
            copy_bytes(f.slot + pointer<const u64>(a.offsets)[block], pointer<const u32>(a.staging + (u64)block * kStageBytes),
                       size & 0x7fffffffu, lane_id(), 32);
    }
    for (u32 left = again; left; left &= left - 1) {  // all threads have found the same
        u32 block = first + (u32)__ffs((int)left) - 1, number = pointer<const uint2>(a.blocks)[block].x;
        NoiseFrame f = pointer<const NoiseFrame>(a.frames)[number];
        u32 notch = pointer<const NoiseResult>(a.results)[number].notch;
        u64 to = f.slot + pointer<const u64>(a.offsets)[block];
        __syncthreads();
        Coded coded = code_block<F>(a, room, f, block_of(a, f, block), notch, ~0u >> 4);
        if (coded.raw) write_raw<F>(a, f, block_of(a, f, block), notch, to);
        else copy_bytes(to, room.out + coded.first / 4, coded.bytes, threadIdx.x, kEncoders);
    }
}
