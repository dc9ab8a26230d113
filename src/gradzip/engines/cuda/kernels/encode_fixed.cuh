// The encoder of coding 0: whole bytes of sign and mantissa in planes, the rest and the exponents through the lanes.
// A block's length follows from sums of code lengths: a lane emits a refill byte for every 8 bits that are pushed. So the
// mapped values are brought to shared memory, measured, and then written where they belong.
// There they are of type S: that of the input, F, or BFloat16 where keep= leaves no more than the upper halves.

constexpr u32 kRefillRoom = 1728;  // bytes of refill that are kept until the block's place is known

struct FixedForm {
    u32 kind, words, whole, rest, pruned, single, base, fields, refill;
};

template <class F>
DEVICE Four read_four(const typename F::Bits* values, u32 i) { return load_four<F>(values, i, true); }

// How values are rounded: not at all, to any number of bits, or to 7 bits and ties to even, which is conversion to bfloat16.
enum { kAsIs = 0, kRounded = 1, kToBFloat16 = 2 };

// Two values that are not NaN, rounded to bfloat16, side by side; subnormals and -0 become 0.
DEVICE u32 two_bfloat16(u32 low, u32 high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("{ .reg .f32 low, high;\n"
        "add.ftz.f32 low, %1, 0f00000000;\n"
        "add.ftz.f32 high, %2, 0f00000000;\n"
        "cvt.rn.bf16x2.f32 %0, high, low; }"
        : "=r"(both)
        : "f"(__uint_as_float(low)), "f"(__uint_as_float(high)));
    return both;
#else
    u32 a = (low << 1) < 0x1000000u ? 0 : low, b = (high << 1) < 0x1000000u ? 0 : high;
    return __byte_perm(a + 0x7fff + ((a >> 16) & 1), b + 0x7fff + ((b >> 16) & 1), 0x7632);
#endif
}

// Whether one of a full block's values has the highest exponent.
DEVICE bool has_infinite(const u16* values) {
    bool found = false;
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)kBlock; i += 32) found |= (values[i] & 0x7f80) == 0x7f80;
    return any(found);
}

// Brings a full block to shared memory, rounded; returns whether a value was or became infinite, or NaN, so that it must be
// done again with more care.
template <class S, int ROUNDING>
DEVICE bool gather_rounded(const Args& a, const u32* x, typename S::Bits* values) {
    u32 top = 0;
#pragma unroll 1
    for (u32 i = 4 * lane_id(); i < (u32)kBlock; i += 8 * 128) {
        Four four[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) four[k] = load_four<Float32>(x, i + 128 * k, true);
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            u32* v = four[k].v;
            if (ROUNDING == kToBFloat16) {
                uint2 halves = make_uint2(two_bfloat16(v[0], v[1]), two_bfloat16(v[2], v[3]));
                top |= halves.x | halves.y;
                *(uint2*)(values + i + 128 * k) = halves;
                continue;
            }
            for (int c = 0; c < 4; c++) v[c] = map_keep_finite(v[c], a, top);
            if (S::kItem == 2)
                *(uint2*)(values + i + 128 * k) = make_uint2(__byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
            else
                store_four<S>(values, i + 128 * k, four[k], true);
        }
    }
    __syncwarp();
    if (ROUNDING == kRounded) return any(top >= 0x7f800000u);
    if constexpr (ROUNDING == kToBFloat16) return any((top & 0x40004000u) != 0) && has_infinite(values);
    return false;
}

// Brings a block's values to shared memory, mapped.
template <class F, class S, int ROUNDING>
DEVICE void gather_fixed(const Args& a, const typename F::Bits* x, int n, typename S::Bits* values) {
    typedef typename S::Bits Stored;
    constexpr u32 kPerLane = 16 / F::kItem;  // values that are copied at once
    constexpr int kHalf = 8 * (F::kItem - S::kItem);
    bool done = n == kBlock && (u64)x % 16 == 0;
    if (done && ROUNDING == kAsIs) {
#pragma unroll
        for (u32 i = kPerLane * lane_id(); i < (u32)kBlock; i += 32 * kPerLane) copy_async(values + i, x + i);
        wait_for_copies();
    }
    if constexpr (ROUNDING != kAsIs) done = done && !gather_rounded<S, ROUNDING>(a, x, values);
    if (done) return;
#pragma unroll 8
    for (u32 i = lane_id(); i < (u32)n; i += 32)
        values[i] = (Stored)(map_fixed<F, ROUNDING != kAsIs>(x[i], a) >> kHalf);
    __syncwarp();
}

// Four neighbours in as many registers as they take in memory.
template <class F>
DEVICE uint4 read_packed(const typename F::Bits* values, u32 i) {
    if (F::kItem == 4) return *(const uint4*)(values + i);
    uint2 halves = *(const uint2*)(values + i);
    return make_uint4(halves.x, halves.y, halves.x, halves.y);
}

template <class F>
DEVICE u32 nth_of(uint4 packed, int k) {
    if (F::kItem == 4) return k == 0 ? packed.x : k == 1 ? packed.y : k == 2 ? packed.z : packed.w;
    return (k < 2 ? packed.x : packed.y) >> 16 * (k & 1);
}

// The rounded mean exponent of rows 0, 16, 32, ...
template <class F>
DEVICE u32 base_of(const typename F::Bits* values, int n) {
    u32 total = 0, count = 0;
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        u32 i = 512 * k + lane_id(), e = i < (u32)n ? exponent_of<F>(values[i]) : 0;
        total += e;
        count += e != 0;
    }
    u32 both = sum(total | count << 20);  // at most 65280 and 256
    total = both & 0xfffff, count = both >> 20;
    return count ? (total + count / 2) / count : 0;
}

// The form of a block from the or of its values and what was summed up for this thread's lane: bits of codes and raw
// exponents, and zeros << 16.
template <class F>
DEVICE FixedForm form_of(u32 bits, bool single, u32 base, bool pruned, u32 column, int n, u32 raw) {
    FixedForm form = {kSparse, 0, 0, 0, pruned, single, base, 0, 0};
    if (bits == 0) return form;
    u32 zeros = pruned ? column >> 16 : 0;
    form.fields = (u32)n - sum(zeros);
    u32 mantissas = bits & ((1u << (F::kField - 1)) - 1);
    u32 width = mantissas ? (u32)(F::kField + 1 - __ffs((int)mantissas)) : (bits >> (8 * F::kItem - 1)) & 1;
    form.whole = width / 8;
    form.rest = width % 8;
    u32 fields = (u32)n / 32 + (lane_id() < (u32)n % 32) - zeros;
    form.refill = sum(((single ? 0 : column & 0xffff) + form.rest * fields) / 8);
    u32 dense = (68 + form.whole * form.fields + form.refill + 3) / 4;
    form.kind = dense < raw ? kDense : kRaw;
    form.words = dense < raw ? dense : raw;
    return form;
}

template <class F>
DEVICE FixedForm measure_fixed(const typename F::Bits* values, int n, u32 raw, const u32* codes, u32* table) {
    u32 base = base_of<F>(values, n);
    make_block_table(codes, base, table);
    // Each thread has four neighbours out of 128, so that its columns are the same 4 lanes all along.
    u32 cost[4] = {0, 0, 0, 0}, bits = 0, common = kAll;
    if (n == kBlock) {
#pragma unroll 4
        for (u32 i = 4 * lane_id(); i < (u32)kBlock; i += 128) {
            uint4 four = read_packed<F>(values, i);
            for (int k = 0; k < 4; k++) cost[k] += (u16)table[exponent_of<F>(nth_of<F>(four, k))];
            bits |= F::kItem == 4 ? four.x | four.y | four.z | four.w : four.x | four.y;
            common &= F::kItem == 4 ? four.x & four.y & four.z & four.w : four.x & four.y;
        }
        if (F::kItem == 2) bits |= bits >> 16, common &= common >> 16;
    } else {
        for (u32 i = 4 * lane_id(); i < (u32)n; i += 128)
            for (u32 k = 0; k < 4 && i + k < (u32)n; k++) {
                u32 v = values[i + k];
                cost[k] += (u16)table[exponent_of<F>(v)];
                bits |= v;
                common &= v;
            }
        if (4 * lane_id() >= (u32)n) bits = common = values[0];
        __syncwarp();
    }
    u32 first = values[0];
    bool single = !any((exponent_of<F>(bits ^ first) | exponent_of<F>(common ^ first)) != 0);
    if (F::kItem == 2) bits &= 0xffff;
    bits = or_of(bits);
    u32 zeros = 0;
    for (int k = 0; k < 4; k++) zeros += zeros_of(cost[k]);
    u32 loose = 0;
    if (any(zeros != 0))  // with -0 or subnormals among them, all values have a field
        for (u32 i = lane_id(); i < (u32)n; i += 32) loose |= exponent_of<F>(values[i]) ? 0 : values[i];
    __syncwarp();
    // Threads that are equal modulo 8 have the same lanes; lane 4 i + k asks thread i.
    u32 column = 0;
    for (int k = 0; k < 4; k++) {
        u32 both = cost_of(cost[k]) | zeros_of(cost[k]) << 16;
        both += __shfl_xor_sync(kAll, both, 8);
        both += __shfl_xor_sync(kAll, both, 16);
        u32 asked = __shfl_sync(kAll, both, (int)lane_id() / 4);
        if ((lane_id() & 3) == (u32)k) column = asked;
    }
    return form_of<F>(bits, single, single ? uniform(exponent_of<F>(first)) : base, !any(loose != 0), column, n, raw);
}

// --- Planes --------------------------------------------------------------------------------------------------------

// Sign and upper mantissa bits of four neighbours: the highest plane where fields are whole bytes.
DEVICE u32 top_plane(Four f) {
    constexpr u32 signs = 0x80808080u;
    u32 high = bytes_of<3>(f.v[0], f.v[1], f.v[2], f.v[3]), low = bytes_of<2>(f.v[0], f.v[1], f.v[2], f.v[3]);
    return (high & signs) | (low & ~signs);
}

// Of a full block whose values all have a field of whole bytes.
template <class F, u32 WHOLE>
DEVICE void write_byte_planes(const typename F::Bits* values, u32* planes) {
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)kBlock / 4; i += 32) {
        if (F::kItem == 2) {
            uint2 halves = *(const uint2*)(values + 4 * i);
            planes[i] = (__byte_perm(halves.x, halves.y, 0x7531) & 0x80808080u) |
                        (__byte_perm(halves.x, halves.y, 0x6420) & 0x7f7f7f7fu);
            continue;
        }
        Four f = read_four<F>(values, 4 * i);
        if (WHOLE == 3) planes[i] = bytes_of<0>(f.v[0], f.v[1], f.v[2], f.v[3]);
        if (WHOLE >= 2) planes[1024 * (WHOLE - 2) + i] = bytes_of<1>(f.v[0], f.v[1], f.v[2], f.v[3]);
        planes[1024 * (WHOLE - 1) + i] = top_plane(f);
    }
}

// Four bytes of each lane, one after the other, to any place; as words, but for the ends.
DEVICE void write_lane_words(u8* to, u32 word) {
    u32 late = (u32)(u64)to & 3, lane = lane_id();
    u32 before = __shfl_up_sync(kAll, word, 1), first = __shfl_sync(kAll, word, 0), last = __shfl_sync(kAll, word, 31);
    if (lane || !late) ((u32*)(to - late))[lane] = __funnelshift_l(before, word, 8 * late);
    if (late && lane < 4 - late) to[lane] = (u8)(first >> 8 * lane);
    if (lane < late) to[128 - late + lane] = (u8)(last >> 8 * (4 - late + lane));
}

// The planes' bytes of 128 values of any block, from value `first` on; values without a field leave no gap, and there are
// `before` fields before them. Returns how many have one.
template <class F>
DEVICE u32 write_plane_parts(const typename F::Bits* values, u8* planes, u32 first, u32 n, const FixedForm& form, u32 before) {
    u32 i = first + 4 * lane_id(), own = 0, kept[4];
    bool has_field[4];
    Four four = {{0, 0, 0, 0}};
    if (i + 4 <= n) four = read_four<F>(values, i);
    else
        for (u32 k = 0; k < 4 && i + k < n; k++) four.v[k] = values[i + k];
    __syncwarp();
    for (u32 k = 0; k < 4; k++) {
        has_field[k] = i + k < n && (!form.pruned || exponent_of<F>(four.v[k]) != 0);
        kept[k] = field_of<F>(four.v[k]) >> ((u32)F::kField - 8 * form.whole);
        own += has_field[k];
    }
    bool gaps = any(own != 4);
    u32 after = gaps ? running_sum(own) : 0;
#pragma unroll
    for (u32 j = 0; j < 3; j++) {
        if (j >= form.whole) break;
        u8* to = planes + j * form.fields + before;
        if (!gaps) {
            write_lane_words(to, __byte_perm(__byte_perm(kept[0] >> 8 * j, kept[1] >> 8 * j, 0x0040),
                                             __byte_perm(kept[2] >> 8 * j, kept[3] >> 8 * j, 0x0040), 0x5410));
            continue;
        }
        u32 place = after - own;
        for (u32 k = 0; k < 4; k++) {
            if (has_field[k]) to[place] = (u8)(kept[k] >> 8 * j);
            place += has_field[k];
        }
        __syncwarp();
    }
    return gaps ? __shfl_sync(kAll, after, 31) : 128;
}

template <class F>
DEVICE void write_planes(const typename F::Bits* values, u8* planes, int n, const FixedForm& form) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < (u32)n; first += 128) before += write_plane_parts<F>(values, planes, first, (u32)n, form, before);
}

template <class F>
DEVICE void write_all_planes(const typename F::Bits* values, u8* planes, int n, const FixedForm& form) {
    bool bytes = form.fields == (u32)kBlock && form.rest == 0 && (F::kField == 24 || F::kField == 8);
    if (bytes && form.whole == 3 && F::kField == 24)
        write_byte_planes<F, F::kField == 24 ? 3 : 1>(values, (u32*)planes);
    else if (bytes && form.whole == 2 && F::kField == 24)
        write_byte_planes<F, F::kField == 24 ? 2 : 1>(values, (u32*)planes);
    else if (bytes && form.whole == 1)
        write_byte_planes<F, 1>(values, (u32*)planes);
    else if (form.whole)
        write_planes<F>(values, planes, n, form);
}

// --- Lanes ---------------------------------------------------------------------------------------------------------

// One row, with the `rest` bits of its fields if there are any.
template <class F, bool REST>
DEVICE void push_fixed_row(Lanes& lanes, u32 v, u32 entry, bool here, bool escapes, u32 up, const FixedForm& form) {
    if (REST) {
        bool has_field = here && (!form.pruned || exponent_of<F>(v) != 0);
        lanes.push(field_of<F>(v) << up, has_field ? form.rest : 0);
    }
    lanes.push_exponent(F::kExponent == 8 ? v << (33 - 8 * F::kItem) : exponent_of<F>(v) << 24, entry, escapes);
}

// Four rows: values and their entries in the block's table.
struct FixedRows {
    u32 v[4], entry[4];
};

template <class F>
DEVICE FixedRows read_rows(const typename F::Bits* values, const u32* table, int row) {
    FixedRows rows;
#pragma unroll
    for (int k = 0; k < 4; k++) rows.v[k] = values[row + 32 * k + (int)lane_id()];
#pragma unroll
    for (int k = 0; k < 4; k++) rows.entry[k] = table[exponent_of<F>(rows.v[k])];
    return rows;
}

#ifndef GRADZIP_AHEAD
#define GRADZIP_AHEAD 0  // whether large messages, too, read rows ahead
#endif

// All rows, the last one first. Returns whether there were escapes. `spills`: whether the refill bytes need more room than
// there is, so that they leave it early. AHEAD: rows are read while those before are pushed; more instructions, less waiting.
template <class F, bool REST, bool AHEAD>
DEVICE bool push_fixed_rows(Lanes& lanes, const typename F::Bits* values, const u32* table, int n, const FixedForm& form,
                            bool spills) {
    u32 up = 32 - (u32)F::kField + 8 * form.whole, lane = lane_id();  // brings the rest of a field to the top
    u32 escapes = 0;
    int grouped = n & ~127;
    for (int row = (n + 31) / 32 * 32 - 32; row >= grouped; row -= 32) {
        u32 i = (u32)row + lane;
        bool here = i < (u32)n;
        u32 v = here ? values[i] : 0, entry = here ? table[exponent_of<F>(v)] : 0;
        escapes |= entry & kEscapes;
        push_fixed_row<F, REST>(lanes, v, entry, here, true, up, form);
        if (spills) lanes.write_beyond(kRefillRoom - 384);  // a row emits up to 3 bytes per lane
    }
    FixedRows next;
    if (AHEAD && grouped) next = read_rows<F>(values, table, grouped - 128);
#pragma unroll 1
    for (int row = grouped - 128; row >= 0; row -= 128) {
        FixedRows now = AHEAD ? next : read_rows<F>(values, table, row);
        if (AHEAD) next = read_rows<F>(values, table, max_int(row - 128, 0));
        u32 flags = now.entry[0] | now.entry[1] | now.entry[2] | now.entry[3];
        // Testing two bits is one instruction, and testing one is two; escaped infinities do no harm.
        if (!any((flags & (kEscapes | kSpecial)) != 0)) {
#pragma unroll
            for (int k = 3; k >= 0; k--) push_fixed_row<F, REST>(lanes, now.v[k], now.entry[k], true, false, up, form);
        } else {
            escapes |= flags & kEscapes;
#pragma unroll
            for (int k = 3; k >= 0; k--) push_fixed_row<F, REST>(lanes, now.v[k], now.entry[k], true, true, up, form);
        }
        if (spills) lanes.write_beyond(kRefillRoom - 384);
    }
    if (spills) lanes.write_rest();
    return any(escapes != 0);
}

// Codes a dense block before its place is known, if its refill bytes fit into the room; else once it is known.
template <class F, class S>
DEVICE void write_fixed(const Args& a, const Turn& turn, const typename S::Bits* values, const FixedForm& form, u32* table,
                        u8* room) {
    typedef typename F::Bits Bits;
    int n = turn.n;
    bool early = form.kind == kDense && form.refill <= kRefillRoom;
    u8* block = nullptr;
    if (!early) block = settle(a, turn, form.kind, form.words, await_place(a, turn, form.words));
    if (form.kind == kRaw) {
        constexpr int kHalf = 8 * (F::kItem - S::kItem);
        for (int i = (int)lane_id(); i < n; i += 32) ((Bits*)block)[i] = (Bits)((u32)values[i] << kHalf);
        if (F::kItem == 2 && n % 2 && lane_id() == 0) ((Bits*)block)[n] = 0;
    }
    if (form.kind != kDense) return;
    if (form.single) clear_block_table(table);
    u32 refill_at = 68 + form.whole * form.fields;
    Lanes lanes(room, block + refill_at);
    bool escapes = form.rest ? push_fixed_rows<S, true, GRADZIP_AHEAD != 0>(lanes, values, table, n, form, !early)
                             : push_fixed_rows<S, false, GRADZIP_AHEAD != 0>(lanes, values, table, n, form, !early);
    if (early) {
        block = settle(a, turn, form.kind, form.words, await_place(a, turn, form.words));
        lanes.refill = block + refill_at;
        lanes.write_rest();
    }
    write_all_planes<S>(values, block + 68, n, form);
    finish_dense(block, {form.whole, form.rest, form.pruned, escapes, form.single, form.base, form.fields}, lanes);
}

// Shared memory of a warp; launch.py reserves as much.
template <class S>
struct FixedRoom {
    typename S::Bits values[kBlock];
    u32 table[256];
    u8 refill[kRefillRoom];
};

template <class F, class S, int ROUNDING, int WARPS>
DEVICE void encode_fixed(const Args& a) {
    FixedRoom<S>& room = ((FixedRoom<S>*)dynamic_shared)[warp_id()];
    for (;;) {
        u32 ticket = next_ticket(a);
        if (ticket >= (u32)a.groups) return;
        Turn turn = turn_of(a, ticket);
        const typename F::Bits* x = pointer<const typename F::Bits>(turn.tensor->values) + turn.start;
        gather_fixed<F, S, ROUNDING>(a, x, turn.n, room.values);
        u32 raw = (u32)(turn.n * F::kItem + 3) / 4;
        FixedForm form = measure_fixed<S>(room.values, turn.n, raw, turn.codes, room.table);
        announce(a, turn, form.words);
        write_fixed<F, S>(a, turn, room.values, form, room.table, room.refill);
        __syncwarp();
    }
}
