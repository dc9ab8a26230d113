// Dense blocks of near mode, decoded with AVX-512 a row at a time: codes, floors and values in one pass, like the
// encoder in near_avx512.h. Several blocks go in lockstep, two of them side by side, to hide each other's latencies.

// A block at work.
struct NearBlock {
    Reader reader;
    __m512i base;
    int first;  // its first value, counted from that of the group
    uint32_t fields, nonzero;
    bool escapes;
    Target target;
};

// Symbols as distances from the base, and what their codes consume. The look-up leaves one word per lane.
struct NearCodes {
    ByteTable distance, consumed;
    explicit NearCodes(const CodeTable& table) : distance(table.distance), consumed(table.consumed) {}
    static __m512i look_up(const ByteTable& table, __m512i x, __mmask64 high) {
        constexpr __mmask64 low_bytes = 0x5555555555555555u;
        return _mm512_mask_blend_epi8(high, _mm512_maskz_permutex2var_epi8(low_bytes, table.part[0], x, table.part[1]),
                                      _mm512_maskz_permutex2var_epi8(low_bytes, table.part[2], x, table.part[3]));
    }
};

// One row of a block on its way out of the lanes.
struct OpenRow {
    __m512i consumed, e, cut, width, low, high;
    __mmask32 nonzero;
};

// The phases of a row. A reader is a variable of its own, never part of an array: in memory it would cost more than the
// phase itself.
struct NearRows {
    const Grids& grids;
    const NearCodes& codes;
    __m512i weave[2];  // words of two vectors side by side, in the order of the lanes

    NearRows(const Grids& g, const NearCodes& c) : grids(g), codes(c) {
        alignas(64) uint16_t order[2][32];
        for (int i = 0; i < 32; i++)
            for (int h = 0; h < 2; h++) order[h][i] = uint16_t(16 * h + i / 2 + i % 2 * 32);
        for (int h = 0; h < 2; h++) weave[h] = _mm512_load_si512(order[h]);
    }
    GZ_INLINE bool symbols(Reader& reader, const NearBlock& b, OpenRow& r) const {
        const __m512i x = reader.x;
        const __mmask64 upper = _mm512_movepi8_mask(x);
        r.consumed = NearCodes::look_up(codes.consumed, x, upper);
        r.nonzero = _mm512_testn_epi16_mask(r.consumed, _mm512_set1_epi16(kZero));
        r.e = _mm512_maskz_add_epi16(r.nonzero, NearCodes::look_up(codes.distance, x, upper), b.base);
        return reader.drop(_mm512_and_si512(r.consumed, _mm512_set1_epi16(15)));
    }
    GZ_INLINE static bool escapes(const OpenRow& r) { return _mm512_test_epi16_mask(r.consumed, _mm512_set1_epi16(kEscaped)); }
    GZ_INLINE static bool raw_exponents(Reader& reader, const NearBlock& b, OpenRow& r) {
        const __mmask32 escaped = _mm512_test_epi16_mask(r.consumed, _mm512_set1_epi16(kEscaped));
        if (!escaped) return true;
        const __m512i raw = _mm512_and_si512(reader.x, _mm512_set1_epi16(255));
        r.e = _mm512_mask_mov_epi16(r.e, escaped, raw);
        r.nonzero = _mm512_test_epi16_mask(r.e, r.e);
        return b.escapes && reader.drop(_mm512_maskz_set1_epi16(escaped, 8));
    }
    template <Grid Kind>
    GZ_INLINE void widths(NearBlock& b, int at, OpenRow& r) const {
        b.nonzero += uint32_t(__builtin_popcount(r.nonzero));
        r.cut = _mm512_min_epu16(_mm512_subs_epu16(grids.row<Kind>(b.first + at), r.e), _mm512_set1_epi16(23));
        r.width = _mm512_maskz_sub_epi16(r.nonzero, _mm512_set1_epi16(24), r.cut);
        r.high = _mm512_setzero_si512();
    }
    GZ_INLINE static bool pop(Reader& reader, __m512i count, __m512i* bits) {
        *bits = _mm512_andnot_si512(_mm512_sllv_epi16(_mm512_set1_epi16(-1), count), reader.x);
        return reader.drop(count);
    }
    GZ_INLINE static bool first_chunk(Reader& reader, OpenRow& r) {
        return pop(reader, _mm512_min_epu16(r.width, _mm512_set1_epi16(8)), &r.low);
    }
    GZ_INLINE static bool second_chunk(Reader& reader, OpenRow& r) {
        const __m512i eight = _mm512_set1_epi16(8);
        __m512i bits;
        if (!pop(reader, _mm512_min_epu16(_mm512_subs_epu16(r.width, eight), eight), &bits)) return false;
        r.low = _mm512_or_si512(r.low, _mm512_slli_epi16(bits, 8));
        return true;
    }
    GZ_INLINE static bool third_chunk(Reader& reader, OpenRow& r) {
        return pop(reader, _mm512_subs_epu16(r.width, _mm512_set1_epi16(16)), &r.high);
    }
    GZ_INLINE void deliver(const NearBlock& b, int at, const OpenRow& r) const {
        const __m512i top = _mm512_slli_epi16(r.e, 7);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            // Exponent and cut in one double word: a funnel shift takes its count from the lowest 5 bits.
            const __m512i both = _mm512_permutex2var_epi16(r.cut, weave[h], top);
            __m512i field = _mm512_permutex2var_epi16(r.low, weave[h], r.high);
            field = _mm512_shldv_epi32(field, _mm512_setzero_si512(), both);  // now the sign is bit 23
            const __m512i magnitude = select(_mm512_set1_epi32(0x7fffff), field, both);
            const __m512i sign = _mm512_slli_epi32(field, 8);
            store_floats(b.target, at + 16 * h, _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi32(int(0x80000000u)), 0xf8));
        }
    }
    // One row of K blocks, phase by phase; false if a stream runs dry.
    template <Grid Kind, int K>
    GZ_INLINE bool row(Reader& r0, Reader& r1, Reader& r2, Reader& r3, NearBlock* b, int at) const {
        OpenRow o0, o1, o2, o3;
        auto each = [&](auto phase) GZ_ALWAYS {
            return phase(r0, b[0], o0) && (K < 2 || phase(r1, b[1], o1)) && (K < 3 || (phase(r2, b[2], o2) && phase(r3, b[3], o3)));
        };
        bool escaped = false;
        __m512i widest = _mm512_setzero_si512();
        if (!each([&](Reader& reader, NearBlock& block, OpenRow& open) GZ_ALWAYS {
                const bool dry = !symbols(reader, block, open);
                escaped |= escapes(open);
                return !dry;
            }))
            return false;
        if (__builtin_expect(escaped, 0))
            if (!each([](Reader& reader, NearBlock& block, OpenRow& open) GZ_ALWAYS { return raw_exponents(reader, block, open); }))
                return false;
        each([&](Reader&, NearBlock& block, OpenRow& open) GZ_ALWAYS {
            widths<Kind>(block, at, open);
            widest = _mm512_max_epu16(widest, open.width);
            return true;
        });
        if (!each([](Reader& reader, NearBlock&, OpenRow& open) GZ_ALWAYS { return first_chunk(reader, open); })) return false;
        if (_mm512_cmpgt_epu16_mask(widest, _mm512_set1_epi16(8)))
            if (!each([](Reader& reader, NearBlock&, OpenRow& open) GZ_ALWAYS { return second_chunk(reader, open); })) return false;
        if (_mm512_cmpgt_epu16_mask(widest, _mm512_set1_epi16(16)))
            if (!each([](Reader& reader, NearBlock&, OpenRow& open) GZ_ALWAYS { return third_chunk(reader, open); })) return false;
        each([&](Reader&, NearBlock& block, OpenRow& open) GZ_ALWAYS {
            deliver(block, at, open);
            return true;
        });
        return true;
    }
};

template <int K, Grid Kind>
int decode_near(NearBlock* b, const Grids& grids, const CodeTable& table, const Ahead& ahead) {
    const NearCodes codes(table);
    const NearRows rows(grids, codes);
    Reader r0 = b[0].reader, r1 = b[K > 1 ? 1 : 0].reader, r2 = b[K > 2 ? 2 : 0].reader, r3 = b[K > 2 ? 3 : 0].reader;
    for (int row = 0; row < kRows; row++) {
        // Half a block ahead: the rest of these blocks, then the start of the next ones.
        const int soon = row < kRows / 2 ? row + kRows / 2 - K * kRows : row - kRows / 2;
        for (int i = 1; i < 3 && ahead.next[i]; i++)
            for (int k = 0; k < K; k++)
                for (int line = 0; line < kRowBytes; line += 64)
                    __builtin_prefetch(ahead.next[i] + kRowBytes * (soon + kRows * k) + line, 0, 2);
        for (int line = 0; line < 6 && ahead.next[0]; line++)  // 24 bits per value, which is more than most need
            __builtin_prefetch(ahead.next[0] + 64 * (row * 6 + line), 0, 2);
        if (!rows.row<Kind, K>(r0, r1, r2, r3, b, row * kLanes)) return GZ_BAD_LANES;
    }
    if (!r0.done() || (K > 1 && !r1.done()) || (K > 2 && (!r2.done() || !r3.done()))) return GZ_BAD_LANES;
    for (int k = 0; k < K; k++)
        if (b[k].nonzero != b[k].fields) return GZ_BAD_FIELDS;
    return 0;
}

template <int K>
int decode_near(NearBlock* b, const Grids& grids, const CodeTable& table, const Ahead& ahead) {
    switch (grids.kind()) {
        case Grid::kGiven: return decode_near<K, Grid::kGiven>(b, grids, table, ahead);
        case Grid::kTheta: return decode_near<K, Grid::kTheta>(b, grids, table, ahead);
        default: return decode_near<K, Grid::kSecond>(b, grids, table, ahead);
    }
}

// Decodes those of a group's blocks that it can, and says which in a bit mask; returns 0 or a gz_error.
int decode_near(const BlockData* block, int count, const Target* target, const Ahead& ahead, uint32_t* done) {
    NearBlock b[kGroup];
    int found = 0;
    uint32_t mask = 0;
    if (!Grids::fits(*block[0].floors.rule)) return 0;
    const Grids grids(block[0].floors);
    const CodeTable& table = *block[0].table;
    for (int k = 0; k < count; k++) {
        DenseHead head;
        LaneOutput lanes{};
        if (block[k].kind != kDense || block[k].n != kBlock) continue;
        if (int error = read_dense(block[k], kBlock, GZ_FLOAT32, kNear, &head, &lanes)) return error;
        // Distances from the base must not leave the range of exponents.
        if (head.single || head.base + table.highest > 255 || head.base + table.lowest < 1) continue;
        NearBlock& n = b[found];
        if (int error = n.reader.start(lanes)) return error;
        n.base = _mm512_set1_epi16(short(head.base - 128));
        n.first = int(block[k].floors.start - block[0].floors.start);
        n.fields = uint32_t(head.fields);
        n.nonzero = 0;
        n.escapes = head.escapes;
        n.target = target[k];
        n.target.stream &= !(reinterpret_cast<uintptr_t>(target[k].out) & 63);
        mask |= 1u << k;
        found++;
    }
    *done = mask;
    int at = 0, error = 0;
    if (found == 4) return decode_near<4>(b, grids, table, ahead);
    for (; at + 2 <= found && !error; at += 2) error = decode_near<2>(b + at, grids, table, {});
    if (at < found && !error) error = decode_near<1>(b + at, grids, table, {});
    return error;
}
