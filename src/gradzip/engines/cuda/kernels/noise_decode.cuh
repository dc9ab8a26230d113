// Decoding: noise_open looks at the heads of frames and finds where blocks begin; then half a warp reads a block, a thread
// for each lane (noise_decode). Where frames are added up, a group has half a warp for each of up to 8 ranks, which read
// the same block of their frames side by side; then all threads add what they read, in rank order (noise_add).
//
// Nothing that a frame says leads outside its slot: sizes are checked before they are used. A frame or block that is not
// what it should be becomes NaN, and `status` tells which frame it was.

constexpr u32 kOpeners = 256;
constexpr u32 kRootBits = 10, kRoots = 1 << kRootBits, kLong = 256;
constexpr u32 kFarthest = 1 << 16;  // bytes; a block has less, wherever a damaged one may lead
constexpr u32 kChunks = 4;  // of 16 bytes of a lane, that are there or on their way

// What half a warp needs to decode a block.
struct NoiseDesk {
    __align__(16) u16 table[kRoots + kLong];  // see NoiseTables
    __align__(16) u8 lanes[kChunks][kNoiseLanes][16];
};

DEVICE u32 byte_at(u64 address) { return __ldg(pointer<const u8>(address)); }  // no kernel here writes to slots
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

// The sum of squares of up to 8 values. Sums of float32 will do for a statistic, unless they overflow or vanish.
DEVICE double squares_of(const float* v, u32 count) {
    float sum_of = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 8; j++) sum_of = __fadd_rn(sum_of, j < count ? __fmul_rn(v[j], v[j]) : 0.0f);
    if (sum_of > 1e-30f && sum_of < 1e38f) return (double)sum_of;
    double wide = 0.0;
#pragma unroll
    for (u32 j = 0; j < 8; j++) wide = wide + (j < count ? (double)v[j] * (double)v[j] : 0.0);
    return wide;
}

// A thread's way through the parts of a block that is decoded; places only grow.
struct NoiseScale {
    const Noise& a;
    const NoiseFrame& f;
    const NoisePart *part, *end;
    u64 start;        // of the block in the frame
    bool nan;         // nothing of the frame is to be believed
    u32 length, next; // where the part and its gap end in the block
    u64 values;       // address of the block's first value, if the part began there
    const i8* shape;  // the same
    float level;

    __device__ NoiseScale(const Noise& args, const NoiseFrame& frame, const NoisePart* first, const NoisePart* last, u64 begin,
                          u32 item, bool refused)
        : a(args), f(frame), part(first), end(last), start(begin), nan(refused) {
        open(item);
    }
    __device__ u32 in_block(u64 place) const {  // of one that is not before it
        return place - start < kNoiseBlock ? (u32)(place - start) : kNoiseBlock;
    }
    __device__ void open(u32 item) {
        u64 place = part->place;
        values = part->values + (start - place) * item;
        shape = part->shape ? pointer<const i8>(part->shape + start - place) : 0;
        length = place + part->length < start ? 0 : in_block(place + part->length);
        next = part + 1 < end ? in_block(part[1].place) : kNoiseBlock;
        level = __uint_as_float(kCanonicalNan);
        if (nan) return;
        const u32* head = pointer<const u32>(f.slot + a.prefix);
        level = coarser(__uint_as_float(head[kNoiseHead / 4 + (u64)(part - (end - f.parts))]), noise_tables(a).notches[head[1] & 127]);
    }
    // What eight integers at a place in the block stand for; returns how many of them are there.
    __device__ u32 scale(u32 at, float* v, u32 item) {
        while (at >= next) {
            part++;
            open(item);
        }
        u32 here = at >= length ? 0 : min_u32(length - at, 8);
        if (level == 0.0f || is_nan(level)) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = level;
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], level);
            if (shape)
#pragma unroll
                for (u32 j = 0; j < 8; j++)
                    if (j < here) v[j] = __fmul_rn(v[j], power_of_two(shape[at + j]));
        }
        return here;
    }
};

// --- One block ---------------------------------------------------------------------------------------------------------

// Copies 16 bytes to shared memory, of which `there` exist, without waiting.
DEVICE void copy_some(void* to, u64 from, u32 there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there)
                 : "memory");
#else
    for (u32 at = 0; at < 4; at++) ((u32*)to)[at] = 4 * at < there ? pointer<const u32>(from)[at] : 0;
#endif
}
// Ends a batch of copies, and waits for all but the last four.
DEVICE void next_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 4;" ::: "memory");
#endif
}
DEVICE void all_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The bits of a lane. They come in chunks of 16 bytes, three of which are fetched ahead; a row takes 48 bits at the most, so
// that one chunk a row is enough, and one that is asked for is needed 5 rows later at the earliest.
struct LaneReader {
    u8 (*room)[kNoiseLanes][16];
    u64 from;          // of the chunks, which begin at multiples of 16
    u32 bytes;         // that may be read
    u32 at, first;     // bits from there
    u32 fetched;       // chunks

    __device__ void open(NoiseDesk& desk, u64 begin, u64 limit) {
        room = desk.lanes;
        from = begin & ~15ull, bytes = (u32)(limit - from < kFarthest ? limit - from : kFarthest);
        at = first = 8 * (u32)(begin & 15);
        for (fetched = 0; fetched < kChunks;) fetch();
        all_copies();
    }
    __device__ void fetch() {
        u32 next = 16 * fetched, there = next >= bytes ? 0 : min_u32(bytes - next, 16);
        copy_some(room[fetched % kChunks][lane_id() % 16], from + (there ? next : 0), there);
        fetched++;
    }
    __device__ u32 word(u32 number) const { return ((const u32*)room[number / 4 % kChunks][lane_id() % 16])[number % 4]; }
    // Four pairs, as digits in bytes.
    __device__ void row(const u16* table, u32* digits) {
        if (fetched < at / 128 + kChunks) fetch();
        next_copies();
        u32 number = at / 32, middle = word(number + 1);
        u32 low = __funnelshift_r(word(number), middle, at), high = __funnelshift_r(middle, word(number + 2), at);
        u32 entry[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 e = table[low % kRoots];
            if (e < 1 << 12) e = table[kRoots + 4 * e + (low >> kRootBits & 3)];
            entry[j] = e;
            u32 length = e >> 12;
            low = __funnelshift_r(low, high, length);
            high >>= length;
            at += length;
        }
        digits[0] = (entry[0] | entry[1] << 16) & 0x0f0f0f0fu;
        digits[1] = (entry[2] | entry[3] << 16) & 0x0f0f0f0fu;
    }
    __device__ u32 used() const { return at - first; }
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
DEVICE u32 spread(u32 nibble) { return nibble * 0x00204081u & kOnes; }
DEVICE u32 half_votes(bool flag) { return __ballot_sync(kAll, flag) >> (lane_id() & 16) & 0xffff; }

// The sum over lower lanes of a half of counts up to 8; `all`: over the half.
DEVICE u32 counts_below(u32 count, u32& all) {
    u32 below = 0, l = lane_id() % 16;
    all = 0;
#pragma unroll
    for (u32 bit = 0; bit < 4; bit++) {
        u32 votes = half_votes(count >> bit & 1);
        below += __popc(votes & ((1u << l) - 1)) << bit;
        all += __popc(votes) << bit;
    }
    return below;
}

// The lists of a block: escapes, then four bytes for each giant, of which an escape of 128 tells.
struct NoiseLists {
    u64 at;
    u32 escapes, giants;            // how many there are
    u32 escapes_seen, giants_seen;

    // By half a warp; both halves come here. Returns false where `bytes` cannot be lists.
    __device__ bool open(u64 list, u32 bytes) {
        u32 l = lane_id() % 16, giant = 0;
        at = list, escapes = bytes, giants = escapes_seen = giants_seen = 0;
#pragma unroll 4
        for (u32 i = l; i < bytes; i += 16) giant |= byte_at(list + i) == 128;
        bool going = half_votes(giant) != 0;
        if (!any(going)) return true;
        if (going) escapes = 0;
        while (any(going)) {
            u32 i = escapes + l;
            u32 marks = half_votes(going && i < bytes && byte_at(list + i) == 128);
            u32 fits = half_votes(going && i + 1 + 4 * (giants + __popc(marks & ((2u << l) - 1))) <= bytes);
            if (!going) continue;
            escapes += __popc(fits), giants += __popc(marks & fits);
            going = fits == 0xffff;
        }
        return escapes + 4 * giants == bytes;
    }
};

// A block of a frame on its way to integers, by half a warp.
struct NoiseBlockReader {
    u64 from;          // its address
    u32 size, values;  // bytes; 0 where there is nothing to read
    u32 mask[2];       // rows that are coded, from the next one on
    u32 number, low;
    int reach;
    u64 plane;         // where this lane's low bits of the next coded row are
    u32 ahead[3];      // the first three of them, under way
    u32 lane_bytes;
    bool raw, coded, bad;
    LaneReader bits;
    NoiseLists lists;

    // Both halves come here; `there`: whether there is a block, of a frame that is fine.
    __device__ NoiseBlockReader(const Noise& a, NoiseDesk& desk, u32& loaded, const NoiseFrame& f, u32 index, bool there) {
        u32 l = lane_id() % 16, form = 0, base = 0, planes = 0, at = 4;
        u64 start = (u64)index * kNoiseBlock, limit = f.slot + f.room;
        values = !there ? 0 : f.values - start < kNoiseBlock ? (u32)(f.values - start) : kNoiseBlock;
        size = number = low = 0, from = plane = 0;
        mask[0] = mask[1] = kAll, ahead[0] = ahead[1] = ahead[2] = 0;
        u32 rows = (values + kNoiseRow - 1) / kNoiseRow;
        raw = coded = bad = false;
        if (there) {
            size = half_at(f.slot + noise_index_offset(a, f) + 2 * (u64)index);
            from = f.slot + pointer<const u64>(a.offsets)[f.first_block + index];
            bad = size && size < 4;
        }
        if (size >= 4) {
            u32 head = word_at(from);
            number = head & 255, form = head >> 8 & 255, base = head >> 16;
            raw = number == kRawClass;
            coded = !raw;
            if (raw) bad = head >> 8 || size != 4 + 4 * values;
            else bad = number >= kClasses || form >> 3 || (form & 3) == 3;
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
            low = low_bits_of(number);
            planes = at;
            at += 16 * low * (__popc(mask[0]) + __popc(mask[1]));
            bad |= at + (8u << width) > size;
            if (!bad) {
                u32 over = width == 0 ? byte_at(from + at + l / 2) >> 4 * (l & 1) & 15
                         : width == 1 ? byte_at(from + at + l) : half_at(from + at + 2 * l);
                my_bytes = base + over;
            }
            at += 8u << width;
        }
        u32 upto = sum_of_lower(my_bytes, l);
        u32 lists_at = at + __shfl_sync(kAll, upto, (int)(lane_id() | 15));  // lanes begin at `at`
        if (coded && lists_at > size) bad = true;
        coded = coded && !bad;
        raw = raw && !bad;
        lane_bytes = my_bytes;

        u32 wanted = coded ? table_of(number) : loaded;
        __syncwarp();
        if (wanted != loaded) {
            const u16* source = noise_tables(a).decode[wanted];
            for (u32 i = 8 * l; i < kRoots + kLong; i += 8 * 16) copy_some(desk.table + i, (u64)(source + i), 16);
        }
        loaded = wanted;
        all_copies();
        if (coded) bits.open(desk, from + at + upto - my_bytes, limit);
        if (!lists.open(from + lists_at, coded ? size - lists_at : 0)) bad = true, coded = false;
        __syncwarp();
        reach = coded ? (int)noise_tables(a).reaches[table_of(number)] : 0;
        plane = from + planes + l;
        if (coded) look_ahead();
    }
    __device__ void look_ahead() {
#pragma unroll
        for (u32 b = 0; b < 3; b++)
            if (b < low) ahead[b] = byte_at(plane + 16 * b);
    }
    // Eight integers of a row; both halves come here. `plain`: none can become NaN.
    __device__ void row(const u16* table, u32 row, float* q, bool& plain) {
        bool here = coded && mask[0] & 1;
        mask[0] = __funnelshift_r(mask[0], mask[1], 1);
        mask[1] >>= 1;
        u32 digits[2] = {0, 0}, lows[2] = {0, 0}, escapes = 0;
        plain = !raw;
        if (here) {
#pragma unroll
            for (u32 b = 0; b < 3; b++)
                if (b < low) {
                    lows[0] |= spread(ahead[b] & 15) << b;
                    lows[1] |= spread(ahead[b] >> 4) << b;
                }
            u64 first = plane;
            plane += 16 * low;
            if (mask[0] | mask[1]) look_ahead();
#pragma unroll 1
            for (u32 b = 3; b < low; b++) {
                u32 byte = byte_at(first + 16 * b);
                lows[0] |= spread(byte & 15) << b;
                lows[1] |= spread(byte >> 4) << b;
            }
            bits.row(table, digits);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 twice = digits[j] & digits[j] >> 1;
                escapes |= ((twice & twice >> 2 & kOnes) * 0x01020408u >> 24) << 4 * j;
            }
        }
        int bias = (reach << low) + (int)(1u << low >> 1);
        if (low <= 3) {
            float offset = __fadd_rn(8388608.0f, (float)bias);
#pragma unroll
            for (u32 j = 0; j < 8; j++) {  // bits of 2^23 + an integer
                u32 bytes = digits[j / 4] << low | lows[j / 4];
                float v = __fsub_rn(__uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7540u | j % 4)), offset);
                q[j] = here ? v : 0.0f;
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                int whole = (int)((digits[j / 4] >> 8 * (j % 4) & 255) << low) + (int)(lows[j / 4] >> 8 * (j % 4) & 255);
                q[j] = here ? (float)(whole - bias) : 0.0f;
            }
        }
        if (any(escapes != 0)) put_escapes(escapes, lows, q, plain);
        if (raw && row * kNoiseRow + 8 * (lane_id() % 16) < values)
#pragma unroll
            for (u32 j = 0; j < 8; j++) q[j] = __uint_as_float(word_at(from + 4 + 4 * (row * kNoiseRow + 8 * (lane_id() % 16) + j)));
    }
    __device__ void put_escapes(u32 escapes, const u32* lows, float* q, bool& plain) {
        u32 in_row, place = lists.escapes_seen + counts_below(__popc(escapes), in_row), giants = 0;
        lists.escapes_seen += in_row;
        int half = (int)(1u << low >> 1);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            if (!(escapes >> j & 1)) continue;
            bad |= place >= lists.escapes;
            int value = place < lists.escapes ? (int)(i8)byte_at(lists.at + place) : 0;
            place++;
            int whole = (value << low) + (int)(lows[j / 4] >> 8 * (j % 4) & 255) - half;
            if (value == -128) giants |= 1u << j;
            else bad |= number < kWideClass && (whole > (int)kNarrowMost || whole < -(int)kNarrowMost);
            q[j] = (float)whole;
        }
        if (!any(giants != 0)) return;
        plain = plain && giants == 0;
        place = lists.giants_seen + counts_below(__popc(giants), in_row);
        lists.giants_seen += in_row;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            if (!(giants >> j & 1)) continue;
            bad |= place >= lists.giants;
            q[j] = place < lists.giants ? __uint_as_float(word_at(lists.at + lists.escapes + 4 * place)) : 0.0f;
            place++;
        }
    }
    // Whether the block turned out damaged; both halves come here.
    __device__ bool damaged() {
        if (coded)
            bad |= lists.escapes_seen != lists.escapes || lists.giants_seen != lists.giants || (bits.used() + 7) / 8 != lane_bytes;
        return half_votes(bad) != 0;
    }
};

DEVICE void tell_damage(const Noise& a, u32 frame, bool bad) {
    if (bad && lane_id() % 16 == 0) atomicOr(pointer<u32>(a.status) + frame, (u32)kNoiseBlocks);
}

// --- Means -------------------------------------------------------------------------------------------------------------

// Eight values of a mean. `squares`: what they add to the sum of squares.
template <class F>
DEVICE void put_means(const Noise& a, NoiseScale& scale, u32 at, float* v, bool plain, double& squares) {
    u32 here = scale.scale(at, v, F::kItem);
    if (a.times != 0.0f) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], a.times);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fdiv_rn(v[j], a.divisor);
    }
    if (!plain || is_nan(scale.level))
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = canonical(v[j]);
    if (a.squares) {
        float stored[8];
#pragma unroll
        for (int j = 0; j < 8; j++) stored[j] = Values<F>::rounded(v[j]);
        squares = squares + squares_of(stored, here);
    }
    if (here == 8) {
        Values<F>::store_four(scale.values, at, v);
        Values<F>::store_four(scale.values, at + 4, v + 4);
    } else {
#pragma unroll
        for (u32 j = 0; j < 8; j++)
            if (j < here) Values<F>::store(scale.values, at + j, v[j]);
    }
}

// Frames of sums become means. A warp has two blocks at once.
template <class F>
DEVICE void noise_decode(const Args& args) {
    constexpr u32 kDecoders = 2;  // warps of a group
    __shared__ NoiseDesk desks[2 * kDecoders];
    const Noise& a = noise_args(args);
    u32 which = threadIdx.x / 16, l = lane_id() % 16, loaded = ~0u;
    for (u32 pair = blockIdx.x * kDecoders + warp_id(); 2 * pair < a.all_blocks; pair += gridDim.x * kDecoders) {
        u32 block = 2 * pair + which % 2;
        bool listed = block < a.all_blocks;
        uint2 entry = pointer<const uint2>(a.blocks)[listed ? block : 2 * pair];
        const NoiseFrame& f = pointer<const NoiseFrame>(a.frames)[entry.x];
        const NoisePart *first = pointer<const NoisePart>(a.parts) + entry.y,
                        *last = pointer<const NoisePart>(a.parts) + f.first_part + f.parts;
        u32 index = block - f.first_block;
        bool there = listed && index < f.blocks, refused = pointer<const u32>(a.verdicts)[entry.x] != kFine;
        u64 start = (u64)index * kNoiseBlock;
        u32 values = !there ? 0 : f.values - start < kNoiseBlock ? (u32)(f.values - start) : kNoiseBlock;
        double squares = 0.0;
        NoiseBlockReader reader(a, desks[which], loaded, f, index, there && !refused);
        u32 rows = (values + kNoiseRow - 1) / kNoiseRow, other = __shfl_xor_sync(kAll, rows, 16);
        {
            NoiseScale scale(a, f, first, last, start, F::kItem, refused || !there);
            for (u32 row = 0; row < (rows > other ? rows : other); row++) {
                float q[8];
                bool plain;
                reader.row(desks[which].table, row, q, plain);
                u32 at = row * kNoiseRow + 8 * l;
                if (at < values) put_means<F>(a, scale, at, q, plain, squares);
            }
        }
        bool bad = reader.damaged();
        if (bad) {
            NoiseScale scale(a, f, first, last, start, F::kItem, true);
            for (u32 at = 8 * l; at < values; at += kNoiseRow) {
                float v[8];
                u32 here = scale.scale(at, v, F::kItem);
                for (u32 j = 0; j < here; j++) Values<F>::store(scale.values, at + j, scale.level);
            }
            squares = (double)scale.level;
        }
        tell_damage(a, entry.x, bad);
        if (a.squares) {
            for (int step = 8; step; step >>= 1) squares = squares + shuffled_double(squares, step);
            if (listed && l == 0) pointer<double>(a.squares)[block] = squares;
        }
        __syncwarp();  // the next block takes this one's place
    }
    all_copies();  // those ahead of the last row, before their memory is another group's
}

// --- Sums --------------------------------------------------------------------------------------------------------------

constexpr u32 kBatch = 4;  // rows that are read before they are added up

// Eight values of this rank; zeros where there are none.
template <class F>
struct OwnValues {
    const NoisePart *sum, *part, *end;

    __device__ void load(u64 at, float* v) {
        while (sum + 1 < end && at >= sum[1].place) sum++, part++;
        u64 i = at - sum->place;
#pragma unroll
        for (u32 j = 0; j < 8; j += 4)
            if (i + j + 4 <= sum->length) Values<F>::load_four(part->values, i + j, v + j);
            else
                for (u32 k = j; k < j + 4; k++) v[k] = i + k < sum->length ? Values<F>::load(part->values, i + k) : 0.0f;
    }
};

// What all ranks sent of this owner's parts is added up in rank order; its own values as they are. All frames have the
// same blocks, and `blocks` lists those of one. The sums of all parts lie in one array, by their places.
template <class F, u32 kHalves>
DEVICE void noise_add(const Args& args) {
    constexpr u32 kThreads = 16 * kHalves;
    __shared__ NoiseDesk desks[kHalves];
    __shared__ __align__(16) float read[kHalves][kBatch][kNoiseRow];
    __shared__ u32 damage;
    const Noise& a = noise_args(args);
    u32 t = threadIdx.x, half = t / 16, l = t % 16, loaded = ~0u;
    const NoiseFrame* frames = pointer<const NoiseFrame>(a.frames);
    const NoisePart *sums = pointer<const NoisePart>(a.sums), *parts = pointer<const NoisePart>(a.parts);
    for (u32 block = blockIdx.x; block < frames[0].blocks; block += gridDim.x) {
        u64 start = (u64)block * kNoiseBlock;
        u32 values = frames[0].values - start < kNoiseBlock ? (u32)(frames[0].values - start) : kNoiseBlock;
        u32 first = pointer<const uint2>(a.blocks)[block].y;
        float* out = pointer<float>(sums[0].values) + start;
        if (t == 0) damage = 0;
        __syncthreads();
        for (u32 round = 0; round < a.world; round += kHalves) {
            u32 rank = round + half, together = min_u32(kHalves, a.world - round);
            bool there = rank < a.world && rank != a.rank;
            const NoiseFrame& f = frames[rank < a.world ? rank : 0];
            bool refused = there && pointer<const u32>(a.verdicts)[rank] != kFine;
            NoiseBlockReader reader(a, desks[half], loaded, f, block, there && !refused);
            NoiseScale scale(a, f, sums + first, sums + f.parts, start, 4, refused || !there);
            OwnValues<F> own = {sums + first, parts + f.first_part + first, sums + f.parts};
            for (u32 row = 0; row * kNoiseRow < values; row += kBatch) {
                for (u32 k = 0; k < kBatch && (row + k) * kNoiseRow < values; k++) {
                    float v[8];
                    bool plain;
                    reader.row(desks[half].table, row + k, v, plain);
                    u32 at = (row + k) * kNoiseRow + 8 * l;
                    if (at < values && rank < a.world) {
                        if (there) scale.scale(at, v, 4);
                        else own.load(start + at, v);
                        float* to = read[half][k] + 8 * l;
                        *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
                        *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
                    }
                }
                __syncthreads();
                for (u32 i = 4 * t; i < kBatch * kNoiseRow && row * kNoiseRow + i < values; i += 4 * kThreads) {
                    float4* to = (float4*)(out + row * kNoiseRow + i);
                    u32 next = round ? 0 : 1;
                    float4 v = round ? *to : *(const float4*)(&read[0][0][0] + i);
                    for (; next < together; next++) {
                        float4 term = *(const float4*)(&read[next][0][0] + i);
                        v = make_float4(__fadd_rn(v.x, term.x), __fadd_rn(v.y, term.y), __fadd_rn(v.z, term.z), __fadd_rn(v.w, term.w));
                    }
                    *to = v;
                }
                __syncthreads();
            }
            bool bad = reader.damaged() && there;
            if (bad && l == 0) damage = 1;
            if (there) tell_damage(a, rank, bad);
        }
        __syncthreads();
        if (damage)
            for (u32 i = t; i < values; i += kThreads) out[i] = __uint_as_float(kCanonicalNan);
        __syncthreads();
    }
    all_copies();
}
