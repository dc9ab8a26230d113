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

    // One row of W blocks; false if a stream runs dry.
    template <int W, Grid Kind>
    __attribute__((always_inline)) bool row(NearBlock* b, int at) const {
        const __m512i ones = _mm512_set1_epi16(-1), eight = _mm512_set1_epi16(8);
        __m512i e[W], cut[W], width[W], low[W], high[W];
        __mmask32 nonzero[W];
        __m512i seen = _mm512_setzero_si512(), widest = seen;
#pragma GCC unroll 2
        for (int k = 0; k < W; k++) {
            const __m512i x = b[k].reader.x;
            const __mmask64 upper = _mm512_movepi8_mask(x);
            const __m512i consumed = NearCodes::look_up(codes.consumed, x, upper);
            const __m512i distance = NearCodes::look_up(codes.distance, x, upper);
            seen = _mm512_or_si512(seen, consumed);
            nonzero[k] = _mm512_testn_epi16_mask(consumed, _mm512_set1_epi16(kZero));
            e[k] = _mm512_maskz_add_epi16(nonzero[k], distance, b[k].base);
            high[k] = consumed;
            if (!b[k].reader.drop(_mm512_and_si512(consumed, _mm512_set1_epi16(15)))) return false;
        }
        if (__builtin_expect(_mm512_test_epi16_mask(seen, _mm512_set1_epi16(kEscaped)) != 0, 0)) {
            for (int k = 0; k < W; k++) {
                const __mmask32 escaped = _mm512_test_epi16_mask(high[k], _mm512_set1_epi16(kEscaped));
                if (!escaped) continue;
                const __m512i raw = _mm512_and_si512(b[k].reader.x, _mm512_set1_epi16(255));
                if (!b[k].escapes || !b[k].reader.drop(_mm512_maskz_set1_epi16(escaped, 8))) return false;
                e[k] = _mm512_mask_mov_epi16(e[k], escaped, raw);
                nonzero[k] = _mm512_test_epi16_mask(e[k], e[k]);
            }
        }
#pragma GCC unroll 2
        for (int k = 0; k < W; k++) {
            b[k].nonzero += uint32_t(__builtin_popcount(nonzero[k]));
            cut[k] = _mm512_min_epu16(_mm512_subs_epu16(grids.row<Kind>(b[k].first + at), e[k]), _mm512_set1_epi16(23));
            width[k] = _mm512_maskz_sub_epi16(nonzero[k], _mm512_set1_epi16(24), cut[k]);
            widest = _mm512_max_epu16(widest, width[k]);
        }
#pragma GCC unroll 2
        for (int k = 0; k < W; k++) {
            const __m512i count = _mm512_min_epu16(width[k], eight);
            low[k] = _mm512_andnot_si512(_mm512_sllv_epi16(ones, count), b[k].reader.x);
            high[k] = _mm512_setzero_si512();
            if (!b[k].reader.drop(count)) return false;
        }
        if (_mm512_cmpgt_epu16_mask(widest, eight))
#pragma GCC unroll 2
            for (int k = 0; k < W; k++) {
                const __m512i count = _mm512_min_epu16(_mm512_subs_epu16(width[k], eight), eight);
                const __m512i bits = _mm512_andnot_si512(_mm512_sllv_epi16(ones, count), b[k].reader.x);
                low[k] = _mm512_or_si512(low[k], _mm512_slli_epi16(bits, 8));
                if (!b[k].reader.drop(count)) return false;
            }
        if (_mm512_cmpgt_epu16_mask(widest, _mm512_set1_epi16(16)))
#pragma GCC unroll 2
            for (int k = 0; k < W; k++) {
                const __m512i count = _mm512_subs_epu16(width[k], _mm512_set1_epi16(16));
                high[k] = _mm512_andnot_si512(_mm512_sllv_epi16(ones, count), b[k].reader.x);
                if (!b[k].reader.drop(count)) return false;
            }
#pragma GCC unroll 2
        for (int k = 0; k < W; k++) {
            const __m512i top = _mm512_slli_epi16(e[k], 7);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                // Exponent and cut in one double word: a funnel shift takes its count from the lowest 5 bits.
                const __m512i both = _mm512_permutex2var_epi16(cut[k], weave[h], top);
                __m512i field = _mm512_permutex2var_epi16(low[k], weave[h], high[k]);
                field = _mm512_shldv_epi32(field, _mm512_setzero_si512(), both);  // now the sign is bit 23
                const __m512i unsigned_value = select(_mm512_set1_epi32(0x7fffff), field, both);
                const __m512i value = _mm512_ternarylogic_epi32(unsigned_value, _mm512_slli_epi32(field, 8),
                                                                _mm512_set1_epi32(int(0x80000000u)), 0xf8);
                store_floats(b[k].target, at + 16 * h, value);
            }
        }
        return true;
    }
};

template <int K, Grid Kind>
int decode_near(NearBlock* b, const Grids& grids, const CodeTable& table, const Ahead& ahead) {
    const NearCodes codes(table);
    const NearRows rows(grids, codes);
    constexpr int wide = K < 2 ? 1 : 2;
    for (int row = 0; row < kBlock / kLanes; row++) {
        // Half a block ahead: the rest of these blocks, then the start of the next ones.
        const ptrdiff_t soon = row < kBlock / kLanes / 2 ? row + 64 - ptrdiff_t(K) * 128 : row - 64;
        for (int i = 1; i < 3 && ahead.next[i]; i++)
            for (int k = 0; k < K; k++)
                for (int line = 0; line < 2; line++)
                    __builtin_prefetch(ahead.next[i] + 128 * (soon + 128 * k) + 64 * line, 0, 2);
        for (int line = 0; line < 6; line++)
            if (ahead.next[0]) __builtin_prefetch(ahead.next[0] + 64 * (row * 6 + line), 0, 2);
        for (int k = 0; k < K; k += wide)
            if (!rows.row<wide, Kind>(b + k, row * kLanes)) return GZ_BAD_LANES;
    }
    for (int k = 0; k < K; k++)
        if (!b[k].reader.done()) return GZ_BAD_LANES;
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
