// The encoder of coding 0: whole bytes of sign and mantissa in planes, the rest and the exponents through the lanes.
// A block's length follows from sums of code lengths: a lane emits a refill byte for every 8 bits that are pushed. So the
// mapped values are brought to shared memory, measured, and then written where they belong.

struct FixedForm {
    u32 kind, words, whole, rest, pruned, single, base, fields, refill;
};

template <class F>
DEVICE Four read_four(const typename F::Bits* values, u32 i) { return load_four<F>(values, i, true); }

// Brings a block's values, mapped, to shared memory. Returns the or of all, and whether exponents differ.
template <class F, bool KEEP>
DEVICE void gather_fixed(const Args& a, const typename F::Bits* x, int n, typename F::Bits* values, u32* bits, bool* differ) {
    typedef typename F::Bits Bits;
    constexpr u32 kPerLane = 16 / F::kItem;  // values that are copied at once
    u32 all = 0, differs = 0;
    if (n == kBlock && (u64)x % 16 == 0) {
#pragma unroll
        for (u32 i = kPerLane * lane_id(); i < (u32)kBlock; i += 32 * kPerLane) copy_async(values + i, x + i);
    } else {
#pragma unroll 8
        for (u32 i = lane_id(); i < (u32)n; i += 32) values[i] = x[i];
    }
    wait_for_copies();
    u32 first = map_fixed<F, KEEP>(values[0], a);
    __syncwarp();
    if (n == kBlock) {
#pragma unroll 4
        for (u32 i = 4 * lane_id(); i < (u32)kBlock; i += 128) {
            Four four = read_four<F>(values, i);
            for (int k = 0; k < 4; k++) {
                four.v[k] = map_fixed<F, KEEP>(four.v[k], a);
                all |= four.v[k];
                differs |= four.v[k] ^ first;
            }
            if (KEEP) store_four<F>(values, i, four, true);
        }
    } else {
        for (u32 i = lane_id(); i < (u32)n; i += 32) {
            u32 q = map_fixed<F, KEEP>(values[i], a);
            all |= q;
            differs |= q ^ first;
            values[i] = (Bits)q;
        }
    }
    __syncwarp();
    *bits = or_of(all);
    *differ = any(exponent_of<F>(differs) != 0);
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

template <class F>
DEVICE FixedForm measure_fixed(const typename F::Bits* values, int n, u32 bits, bool differ, const u32* codes, u32* table) {
    FixedForm form = {kSparse, 0, 0, 0, 0, !differ, 0, 0, 0};
    if (bits == 0) return form;
    form.base = differ ? base_of<F>(values, n) : uniform(exponent_of<F>(values[0]));
    make_block_table(codes, form.base, table);
    // Each thread has four neighbours out of 128, so that its columns are the same 4 lanes all along.
    u32 cost[4] = {0, 0, 0, 0};
    if (n == kBlock) {
#pragma unroll 4
        for (u32 i = 4 * lane_id(); i < (u32)kBlock; i += 128) {
            Four four = read_four<F>(values, i);
            for (int k = 0; k < 4; k++) cost[k] += table[exponent_of<F>(four.v[k])] >> 16;
        }
    } else {
        for (u32 i = 4 * lane_id(); i < (u32)n; i += 128)
            for (u32 k = 0; k < 4 && i + k < (u32)n; k++) cost[k] += table[exponent_of<F>(values[i + k])] >> 16;
        __syncwarp();
    }
    u32 zeros = sum(zeros_of(cost[0]) + zeros_of(cost[1]) + zeros_of(cost[2]) + zeros_of(cost[3])), loose = 0;
    if (zeros)  // with -0 or subnormals among them, all values have a field
        for (u32 i = lane_id(); i < (u32)n; i += 32) loose |= exponent_of<F>(values[i]) ? 0 : values[i];
    __syncwarp();
    form.pruned = !any(loose != 0);
    form.fields = form.pruned ? (u32)n - zeros : (u32)n;
    u32 mantissas = bits & ((1u << (F::kField - 1)) - 1);
    u32 width = mantissas ? (u32)(F::kField + 1 - __ffs((int)mantissas)) : (bits >> (8 * F::kItem - 1)) & 1;
    form.whole = width / 8;
    form.rest = width % 8;
    u32 refill = 0;
    for (u32 k = 0; k < 4; k++) {
        // Threads that are equal modulo 8 have the same lanes.
        u32 both = cost_of(cost[k]) | zeros_of(cost[k]) << 16, lane = 4 * (lane_id() & 7) + k;
        both += __shfl_xor_sync(kAll, both, 8);
        both += __shfl_xor_sync(kAll, both, 16);
        u32 fields = (u32)n / 32 + (lane < (u32)n % 32) - (form.pruned ? both >> 16 : 0);
        u32 pushed = (form.single ? 0 : both & 0xffff) + form.rest * fields;
        refill += lane_id() < 8 ? pushed / 8 : 0;
    }
    form.refill = sum(refill);
    u32 dense = (68 + form.whole * form.fields + form.refill + 3) / 4, raw = (u32)(n * F::kItem + 3) / 4;
    form.kind = dense < raw ? kDense : kRaw;
    form.words = dense < raw ? dense : raw;
    return form;
}

// --- Planes --------------------------------------------------------------------------------------------------------

// Sign and upper mantissa bits of four neighbours: the highest plane where fields are whole bytes.
template <class F>
DEVICE u32 top_plane(Four f) {
    constexpr u32 signs = 0x80808080u;
    if (F::kItem == 4) {
        u32 high = bytes_of<3>(f.v[0], f.v[1], f.v[2], f.v[3]), low = bytes_of<2>(f.v[0], f.v[1], f.v[2], f.v[3]);
        return (high & signs) | (low & ~signs);
    }
    u32 high = bytes_of<1>(f.v[0], f.v[1], f.v[2], f.v[3]), low = bytes_of<0>(f.v[0], f.v[1], f.v[2], f.v[3]);
    return (high & signs) | (low & ~signs);
}

// Of a full block whose values all have a field of whole bytes.
template <class F, u32 WHOLE>
DEVICE void write_byte_planes(const typename F::Bits* values, u32* planes) {
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)kBlock / 4; i += 32) {
        Four f = read_four<F>(values, 4 * i);
        if (WHOLE == 3) planes[i] = bytes_of<0>(f.v[0], f.v[1], f.v[2], f.v[3]);
        if (WHOLE >= 2) planes[1024 * (WHOLE - 2) + i] = bytes_of<1>(f.v[0], f.v[1], f.v[2], f.v[3]);
        planes[1024 * (WHOLE - 1) + i] = top_plane<F>(f);
    }
}

// Of any block, row by row: values without a field leave no gap.
template <class F>
DEVICE void write_planes(const typename F::Bits* values, u8* planes, int n, const FixedForm& form) {
    u32 down = (u32)F::kField - 8 * form.whole, before = 0, lower = lower_lanes();
#pragma unroll 4
    for (int row = 0; row < n; row += 32) {
        int i = row + (int)lane_id();
        u32 v = i < n ? values[i] : 0;
        bool has_field = i < n && (!form.pruned || exponent_of<F>(v) != 0);
        u32 votes = __ballot_sync(kAll, has_field);
        if (has_field) {
            u32 kept = field_of<F>(v) >> down;
            u8* to = planes + before + (u32)__popc(votes & lower);
            if (form.whole > 0) to[0] = (u8)kept;
            if (form.whole > 1) to[form.fields] = (u8)(kept >> 8);
            if (form.whole > 2) to[2 * form.fields] = (u8)(kept >> 16);
        }
        before += (u32)__popc(votes);
    }
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
DEVICE void push_fixed_row(Lanes& lanes, u32 v, u32 entry, bool here, bool escapes, u32 down, const FixedForm& form) {
    u32 e = exponent_of<F>(v);
    if (REST) {
        bool has_field = here && (!form.pruned || e != 0);
        lanes.push(has_field ? (field_of<F>(v) >> down) & ((1u << form.rest) - 1) : 0, has_field ? form.rest : 0);
    }
    lanes.push_exponent(e, entry, escapes);
}

// All rows, the last one first. Returns whether there were escapes.
template <class F, bool REST>
DEVICE bool push_fixed_rows(Lanes& lanes, const typename F::Bits* values, const u32* table, int n, const FixedForm& form) {
    u32 down = (u32)F::kField - 8 * form.whole - form.rest, lane = lane_id();
    u32 escapes = 0;
    int grouped = n & ~127;
    for (int row = (n + 31) / 32 * 32 - 32; row >= grouped; row -= 32) {
        u32 i = (u32)row + lane;
        bool here = i < (u32)n;
        u32 v = here ? values[i] : 0, entry = here ? table[exponent_of<F>(v)] : 0;
        bool now = any(entry & kEscapes);
        escapes |= now;
        push_fixed_row<F, REST>(lanes, v, entry, here, now, down, form);
        lanes.write_half();
    }
#pragma unroll 1
    for (int row = grouped - 128; row >= 0; row -= 128) {
        u32 i = (u32)row + lane, v[4], entry[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = values[i + 32 * k];
#pragma unroll
        for (int k = 0; k < 4; k++) entry[k] = table[exponent_of<F>(v[k])];
        bool now = any((entry[0] | entry[1] | entry[2] | entry[3]) & kEscapes);
        escapes |= now;
#pragma unroll
        for (int k = 3; k >= 0; k--) push_fixed_row<F, REST>(lanes, v[k], entry[k], true, now, down, form);
        lanes.write_half();
    }
    lanes.write_rest();
    return escapes != 0;
}

constexpr u32 kRefillRoom = 2048;  // bytes of refill that are kept until the block's place is known

// Codes a dense block before its place is known, if its refill bytes fit; else once it is known.
template <class F>
DEVICE void write_fixed(const Args& a, const Turn& turn, const typename F::Bits* values, const FixedForm& form, u32* table,
                        u8* ring, u8* kept) {
    typedef typename F::Bits Bits;
    int n = turn.n;
    if (form.kind == kDense && form.single) clear_block_table(table);
    bool early = form.kind == kDense && form.refill <= kRefillRoom;
    u8* block = nullptr;
    if (!early) block = settle(a, turn, form.kind, form.words, await_place(a, turn, form.words));
    if (form.kind == kRaw) {
        for (int i = (int)lane_id(); i < n; i += 32) ((Bits*)block)[i] = values[i];
        if (F::kItem == 2 && n % 2 && lane_id() == 0) ((Bits*)block)[n] = 0;
        return;
    }
    if (form.kind != kDense) return;
    u32 refill_at = 68 + form.whole * form.fields;
    Lanes lanes(ring, early ? kept : block + refill_at);
    bool escapes = form.rest ? push_fixed_rows<F, true>(lanes, values, table, n, form)
                             : push_fixed_rows<F, false>(lanes, values, table, n, form);
    if (early) {
        block = settle(a, turn, form.kind, form.words, await_place(a, turn, form.words));
        copy_bytes(block + refill_at, kept, form.refill);
    }
    write_all_planes<F>(values, block + 68, n, form);
    finish_dense(block, {form.whole, form.rest, form.pruned, escapes, form.single, form.base, form.fields}, lanes);
}

template <class F, bool KEEP, int WARPS>
DEVICE void encode_fixed(const Args& a) {
    typedef typename F::Bits Bits;
    __shared__ __align__(kRing) u8 rings[WARPS][kRing];
    __shared__ __align__(16) Bits gathered[WARPS][kBlock];
    __shared__ __align__(4) u8 kept[WARPS][kRefillRoom];
    __shared__ u32 tables[WARPS][256];
    u32 warp = warp_id();
    for (Turn turn; next_turn(a, turn);) {
        u32 bits;
        bool differ;
        const Bits* x = pointer<const Bits>(turn.tensor->values) + turn.start;
        gather_fixed<F, KEEP>(a, x, turn.n, gathered[warp], &bits, &differ);
        FixedForm form = measure_fixed<F>(gathered[warp], turn.n, bits, differ, turn.codes, tables[warp]);
        announce(a, turn, form.words);
        write_fixed<F>(a, turn, gathered[warp], form, tables[warp], rings[warp], kept[warp]);
        __syncwarp();
    }
}
