// The encoder of coding 0: whole bytes of sign and mantissa in planes, the rest and the exponents through the lanes.
// A block's length follows from sums of code lengths: a lane emits a refill byte for every 8 bits that are pushed. So a
// first look at the values finds lengths and exponents, and then the block is written where it belongs.

struct FixedForm {
    u32 kind, words, whole, rest, pruned, single, base, fields, refill;
};

// What a look at all values of a block gives. Each thread has four neighbours out of 128: columns of 4 lanes.
struct FixedCounts {
    u32 cost[4] = {0, 0, 0, 0};  // of the columns: bits of all codes, and zeros << 10
    u32 bits = 0;                // the or of all values
    u32 loose = 0;               // the or of those with exponent 0
    u32 differs = 0;             // whether an exponent differs from the first one
};

template <class F, bool KEEP>
DEVICE void count_four(const Args& a, Four four, const u32* table, u32 first, u32* exponents, FixedCounts& c) {
    u32 e[4];
    for (int k = 0; k < 4; k++) {
        u32 q = map_fixed<F, KEEP>(four.v[k], a);
        e[k] = exponent_of<F>(q);
        c.cost[k] += table[e[k]] >> 16;
        c.bits |= q;
        if (e[k] == 0) c.loose |= q;
    }
    u32 packed = e[0] | e[1] << 8 | e[2] << 16 | e[3] << 24;
    *exponents = packed;
    c.differs |= packed ^ first;
}

template <class F, bool KEEP>
DEVICE FixedForm measure_fixed(const Args& a, const Tensor& t, u64 start, int n, const u32* codes, u32* table, u32* exponents) {
    typedef typename F::Bits Bits;
    const Bits* x = pointer<const Bits>(t.values) + start;
    u32 e[8], nonzero;
    u32 base = sample_block<F, kFixed, kNoFloor, KEEP>(a, t, start, n, e, &nonzero);
    make_block_table(codes, base, table);
    u32 first = __shfl_sync(kAll, e[0], 0) * 0x01010101u;
    FixedCounts c;
    if (n == kBlock) {
        bool aligned = can_load_four<F>(x);
#pragma unroll 4
        for (u32 i = 4 * lane_id(); i < (u32)kBlock; i += 128)
            count_four<F, KEEP>(a, load_four<F>(x, i, aligned), table, first, exponents + i / 4, c);
    } else {
        for (u32 i = 4 * lane_id(); i < (u32)n; i += 128) {
            u32 packed = 0;
            for (u32 k = 0; k < 4 && i + k < (u32)n; k++) {
                u32 q = map_fixed<F, KEEP>(x[i + k], a), exponent = exponent_of<F>(q);
                c.cost[k] += table[exponent] >> 16;
                c.bits |= q;
                if (exponent == 0) c.loose |= q;
                packed |= exponent << 8 * k;
                c.differs |= exponent ^ (first & 255);
            }
            exponents[i / 4] = packed;
        }
    }
    FixedForm form = {kSparse, 0, 0, 0, 0, 0, base, 0, 0};
    c.bits = or_of(c.bits);
    if (c.bits == 0) return form;

    u32 mantissas = c.bits & ((1u << (F::kField - 1)) - 1);
    u32 width = mantissas ? (u32)(F::kField + 1 - __ffs((int)mantissas)) : (c.bits >> (8 * F::kItem - 1)) & 1;
    form.whole = width / 8;
    form.rest = width % 8;
    form.pruned = !any(c.loose != 0);
    form.single = !any(c.differs != 0);
    if (form.single) form.base = first & 255;
    u32 zeros = 0, refill = 0;
    for (u32 k = 0; k < 4; k++) {
        // Threads that are equal modulo 8 have the same lanes.
        u32 bits = c.cost[k] & 1023, zero = c.cost[k] >> 10, lane = 4 * (lane_id() & 7) + k;
        u32 both = bits | zero << 16;
        both += __shfl_xor_sync(kAll, both, 8);
        both += __shfl_xor_sync(kAll, both, 16);
        u32 fields = (u32)n / 32 + (lane < (u32)n % 32);
        if (form.pruned) fields -= both >> 16;
        u32 pushed = (form.single ? 0 : both & 0xffff) + form.rest * fields;
        zeros += zero;
        refill += lane_id() < 8 ? pushed / 8 : 0;
    }
    form.fields = form.pruned ? (u32)n - sum(zeros) : (u32)n;
    form.refill = sum(refill);
    u32 dense = (68 + form.whole * form.fields + form.refill + 3) / 4, raw = (u32)(n * F::kItem + 3) / 4;
    form.kind = dense < raw ? kDense : kRaw;
    form.words = dense < raw ? dense : raw;
    return form;
}

// --- Planes --------------------------------------------------------------------------------------------------------

// Of a full block whose values all have a field.
template <class F, bool KEEP>
DEVICE void write_full_planes(const Args& a, const typename F::Bits* x, u32* planes, u32 whole) {
    bool aligned = can_load_four<F>(x);
    u32 down = (u32)F::kField - 8 * whole;
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)kBlock / 4; i += 32) {
        Four four = load_four<F>(x, 4 * i, aligned);
        u32 kept[4];
        for (int k = 0; k < 4; k++) kept[k] = field_of<F>(map_fixed<F, KEEP>(four.v[k], a)) >> down;
        if (whole > 0) planes[i] = bytes_of<0>(kept[0], kept[1], kept[2], kept[3]);
        if (whole > 1) planes[1024 + i] = bytes_of<1>(kept[0], kept[1], kept[2], kept[3]);
        if (whole > 2) planes[2048 + i] = bytes_of<2>(kept[0], kept[1], kept[2], kept[3]);
    }
}

// Of any block, row by row: values without a field leave no gap.
template <class F, bool KEEP>
DEVICE void write_planes(const Args& a, const typename F::Bits* x, const u8* exponents, u8* planes, int n, const FixedForm& form) {
    u32 down = (u32)F::kField - 8 * form.whole, before = 0, lower = lower_lanes();
#pragma unroll 4
    for (int row = 0; row < n; row += 32) {
        int i = row + (int)lane_id();
        bool has_field = i < n && (!form.pruned || exponents[i] != 0);
        u32 votes = __ballot_sync(kAll, has_field);
        if (has_field) {
            u32 kept = field_of<F>(map_fixed<F, KEEP>(x[i], a)) >> down;
            u8* to = planes + before + (u32)__popc(votes & lower);
            if (form.whole > 0) to[0] = (u8)kept;
            if (form.whole > 1) to[form.fields] = (u8)(kept >> 8);
            if (form.whole > 2) to[2 * form.fields] = (u8)(kept >> 16);
        }
        before += (u32)__popc(votes);
    }
}

// --- Lanes ---------------------------------------------------------------------------------------------------------

// One row, with the `rest` bits of its fields if there are any.
template <class F, bool KEEP, bool REST>
DEVICE void push_fixed_row(const Args& a, const typename F::Bits* x, Lanes& lanes, u32 i, u32 e, u32 entry, bool here,
                           bool escapes, u32 down, const FixedForm& form) {
    if (REST) {
        bool has_field = here && (!form.pruned || e != 0);
        u32 kept = has_field ? (field_of<F>(map_fixed<F, KEEP>(x[i], a)) >> down) & ((1u << form.rest) - 1) : 0;
        lanes.push(kept, has_field ? form.rest : 0);
    }
    lanes.push_exponent(e, entry, escapes);
}

// All rows, the last one first. Returns whether there were escapes.
template <class F, bool KEEP, bool REST>
DEVICE bool push_fixed_rows(const Args& a, const typename F::Bits* x, Lanes& lanes, const u8* exponents, const u32* table,
                            int n, const FixedForm& form) {
    u32 down = (u32)F::kField - 8 * form.whole - form.rest, lane = lane_id();
    u32 escapes = 0;
    int grouped = n & ~127;
    for (int row = (n + 31) / 32 * 32 - 32; row >= grouped; row -= 32) {
        u32 i = (u32)row + lane;
        bool here = i < (u32)n;
        u32 e = here ? exponents[i] : 0, entry = here ? table[e] : 0;
        bool now = any(entry & kEscapes);
        escapes |= now;
        push_fixed_row<F, KEEP, REST>(a, x, lanes, i, e, entry, here, now, down, form);
    }
    for (int row = grouped - 128; row >= 0; row -= 128) {
        u32 i = (u32)row + lane, e[4], entry[4];
        for (int k = 0; k < 4; k++) e[k] = exponents[i + 32 * k];
        for (int k = 0; k < 4; k++) entry[k] = table[e[k]];
        bool now = any((entry[0] | entry[1] | entry[2] | entry[3]) & kEscapes);
        escapes |= now;
        for (int k = 3; k >= 0; k--)
            push_fixed_row<F, KEEP, REST>(a, x, lanes, i + 32 * (u32)k, e[k], entry[k], true, now, down, form);
    }
    return escapes != 0;
}

template <class F, bool KEEP>
DEVICE void write_fixed(const Args& a, const Tensor& t, u64 start, int n, const FixedForm& form, u32* table,
                        const u32* exponents, u8* block) {
    typedef typename F::Bits Bits;
    const Bits* x = pointer<const Bits>(t.values) + start;
    if (form.kind == kRaw) {
        for (int i = (int)lane_id(); i < n; i += 32) ((Bits*)block)[i] = (Bits)map_fixed<F, KEEP>(x[i], a);
        if (F::kItem == 2 && n % 2 && lane_id() == 0) ((Bits*)block)[n] = 0;
        return;
    }
    if (form.single) clear_block_table(table);
    const u8* e = (const u8*)exponents;
    if (form.fields == (u32)kBlock)
        write_full_planes<F, KEEP>(a, x, (u32*)(block + 68), form.whole);
    else if (form.whole)
        write_planes<F, KEEP>(a, x, e, block + 68, n, form);
    Lanes lanes(block + 68 + form.whole * form.fields);
    bool escapes = form.rest ? push_fixed_rows<F, KEEP, true>(a, x, lanes, e, table, n, form)
                             : push_fixed_rows<F, KEEP, false>(a, x, lanes, e, table, n, form);
    finish_dense(block, {form.whole, form.rest, form.pruned, escapes, form.single, form.base, form.fields}, lanes);
}

template <class F, bool KEEP, int WARPS>
DEVICE void encode_fixed(const Args& a) {
    __shared__ u32 tables[WARPS][256];
    __shared__ u32 exponents[WARPS][kBlock / 4];
    __shared__ u32 all_words[WARPS];
    __shared__ GroupRoom room;
    u32 warp = threadIdx.x >> 5;
    for (;;) {
        u32 group = next_group(a, room);
        if (group >= (u32)a.groups) return;
        int number = tensor_of_group(a, group);
        const Tensor& t = a.tensor[number];
        u64 block = (u64)(group - t.first_group) * WARPS + warp, start = block * kBlock;
        bool here = start < t.numel;
        int n = here ? (int)(t.numel - start < kBlock ? t.numel - start : kBlock) : 0;
        const u32* codes = pointer<const u32>(a.codes) + (t.first_segment + block / kSegmentBlocks) * kCodeStride;
        FixedForm form = {};
        if (here) form = measure_fixed<F, KEEP>(a, t, start, n, codes, tables[warp], exponents[warp]);
        __syncwarp();
        u64 place = place_of_block<WARPS>(a, t, group, form.words, all_words, room);
        if (!here) continue;
        note_block(a, number, t, block, form.kind, form.words, place);
        if (form.words == 0) continue;
        u8* to = pointer<u8>(t.body) + blocks_offset(t.numel, a.book) + 4 * place;
        write_fixed<F, KEEP>(a, t, start, n, form, tables[warp], exponents[warp], to);
    }
}
