// The sparse form of near mode (docs/format.md, "Sparse block"). Included like values.h;
// find_nonzero is a stage of the instruction set.

// Bits from the lowest up. Writes whole words, up to 8 bytes ahead, because a branch on what is full would often miss.
struct BitWriter {
    uint8_t* at;
    uint64_t held = 0;
    int count = 0;  // below 8 between calls
    void put(uint64_t bits, int n) {  // n <= 32
        held |= bits << count;
        count += n;
        std::memcpy(at, &held, 8);
        at += count >> 3;
        held >>= count & ~7;
        count &= 7;
    }
    void one_after(int zeros) {  // so many zeros, then a one
        for (; zeros >= 32; zeros -= 32) put(0, 32);
        put(uint64_t(1) << zeros, zeros + 1);
    }
    void finish() {  // to the next whole byte
        *at = uint8_t(held);
        at += count > 0;
        held = 0;
        count = 0;
    }
};

inline int low_bits(int m, int n) { return 31 - __builtin_clz(uint32_t(n / m)); }

// The non-zero values of a block that has at most half of them, in order. Vector stores may run over the end.
struct SparseValues {
    int m = 0;
    static constexpr int room = kBlock / 2 + 64;
    uint16_t position[room], exponent[room], distance[room], width[room];
    uint16_t low[room], high[room];  // the lane part
};

// False if more than half of the values are not zero.
inline bool gather_plain(const BlockIn& in, const Split& split, Scratch& scratch, SparseValues& v) {
    v.m = int(split.stats.nonzero);
    if (2 * v.m > in.n) return false;
    find_nonzero(scratch.exponent, in.n, v.position);
    const uint32_t* q = static_cast<const uint32_t*>(mapped_values(in, split, scratch));
    for (int i = 0; i < v.m; i++) {
        const int p = v.position[i], e = scratch.exponent[p], kept = kept_near(e, in.floor[p]);
        const uint32_t bits = (q[p] >> 31) << kept | (q[p] & 0x7fffff) >> (23 - kept);
        v.exponent[i] = uint16_t(e);
        v.distance[i] = uint16_t(e - 127 - in.floor[p]);
        v.width[i] = uint16_t(1 + kept);
        v.low[i] = uint16_t(bits);
        v.high[i] = uint16_t(bits >> 16);
    }
    return true;
}

// Returns the size of the sparse form of n values, or -1 where another form is chosen.
inline int encode_sparse(const SparseValues& v, int n, const CodeTable& table, int base, uint8_t* out) {
    const int m = v.m, low = low_bits(m, n);
    auto code_cost_of = [&](int e) {
        int length = table.length[symbol_of(e, base)];
        return (length & 15) + (length & kEscaped ? 8 : 0);
    };
    int64_t total = 0, kept_sum = -m, code_cost = int64_t(code_cost_of(0)) * (n - m);
    for (int i = 0; i < m; i++) {
        total += v.distance[i];
        kept_sum += v.width[i];
        code_cost += code_cost_of(v.exponent[i]);
    }
    if (total > 65535) return -1;
    const int64_t low_count = m * (low + 1), high_count = m + ((n - 1) >> low), unary_count = m + total;
    if (32 + low_count + high_count + unary_count + kept_sum >= 544 + code_cost + m + kept_sum) return -1;
    auto bytes = [](int64_t bits) { return (bits + 7) / 8; };
    int64_t size = 4 + bytes(low_count) + bytes(high_count) + bytes(unary_count) + bytes(kept_sum);
    if ((size + 3) / 4 >= n) return -1;  // no shorter than raw
    auto bits_of = [&](int i) { return v.low[i] | uint32_t(v.high[i]) << 16; };

    store16(out, unsigned(m));
    store16(out + 2, unsigned(total));
    BitWriter writer{out + 4};
    for (int i = 0; i < m; i++)
        writer.put(bits_of(i) >> (v.width[i] - 1) | uint32_t(v.position[i] & ((1 << low) - 1)) << 1, low + 1);
    writer.finish();
    int next = 0;
    for (int i = 0; i < m; i++) {
        int bit = (v.position[i] >> low) + i;
        writer.one_after(bit - next);
        next = bit + 1;
    }
    for (; next < int(high_count); next += 32) writer.put(0, int(high_count) - next < 32 ? int(high_count) - next : 32);
    writer.finish();
    for (int i = 0; i < m; i++) writer.one_after(v.distance[i]);
    writer.finish();
    for (int i = 0; i < m; i++) {
        const int kept = v.width[i] - 1;
        writer.put(bits_of(i) & ((1u << kept) - 1), kept);
    }
    writer.finish();
    while ((writer.at - out) & 3) *writer.at++ = 0;
    return int(writer.at - out);
}

// 64 bits from any bit on; blocks are followed by readable bytes.
inline uint64_t bits_at(const uint8_t* data, int bit) {
    uint64_t word;
    std::memcpy(&word, data + (bit >> 3), 8);
    return word >> (bit & 7);
}

// The set bits of a bit vector, one after the other.
struct OneBits {
    const uint8_t* data;
    int at, count;
    // The position of the next one, or `count` if there is none.
    int next() {
        while (at < count) {
            uint64_t word = bits_at(data, at) & ((uint64_t(1) << 56) - 1);  // 56 bits are there whatever the alignment
            if (!word) {
                at += 56;
                continue;
            }
            int found = at + __builtin_ctzll(word);
            at = found + 1;
            return found < count ? found : count;
        }
        return count;
    }
};

inline bool clean_tail(const uint8_t* data, int bits) {
    return bits % 8 == 0 || data[bits / 8] >> (bits % 8) == 0;
}

inline int decode_sparse(const uint8_t* data, int size, int n, const int8_t* floor, uint32_t* q) {
    if (size < 4) return GZ_BAD_SPARSE;
    const int m = int(load16(data)), total = int(load16(data + 2));
    if (m == 0 || m > n) return GZ_BAD_SPARSE;
    const int low = low_bits(m, n);
    const int low_count = m * (low + 1), high_count = m + ((n - 1) >> low), unary_count = m + total;
    const int lows_at = 4, highs_at = lows_at + (low_count + 7) / 8, unary_at = highs_at + (high_count + 7) / 8;
    const int mantissas_at = unary_at + (unary_count + 7) / 8;
    if (mantissas_at > size) return GZ_BAD_SPARSE;
    const uint8_t *lows = data + lows_at, *highs = data + highs_at, *unary = data + unary_at, *mantissas = data + mantissas_at;
    if (!clean_tail(lows, low_count) || !clean_tail(highs, high_count) || !clean_tail(unary, unary_count))
        return GZ_BAD_SPARSE;
    std::memset(q, 0, size_t(n) * 4);
    const int mantissa_bits = (size - mantissas_at) * 8;
    OneBits high{highs, 0, high_count}, length{unary, 0, unary_count};
    int used = 0, previous = -1, previous_length = -1;
    for (int i = 0; i < m; i++) {
        int high_bit = high.next(), length_bit = length.next();
        if (high_bit == high_count || length_bit == unary_count) return GZ_BAD_SPARSE;
        uint32_t field = uint32_t(bits_at(lows, i * (low + 1)) & ((2u << low) - 1));
        int p = (high_bit - i) << low | int(field >> 1), distance = length_bit - previous_length - 1;
        previous_length = length_bit;
        if (p <= previous || p >= n) return GZ_BAD_SPARSE;
        previous = p;
        int e = distance + 127 + floor[p];
        if (e < 1 || e > 255) return GZ_BAD_SPARSE;
        int kept = kept_near(e, floor[p]);
        if (used + kept > mantissa_bits) return GZ_BAD_SPARSE;
        uint32_t mantissa = uint32_t(bits_at(mantissas, used) & ((1u << kept) - 1)) << (23 - kept);
        used += kept;
        q[p] = (field & 1) << 31 | uint32_t(e) << 23 | mantissa;
    }
    if (previous_length != unary_count - 1 || high.next() != high_count) return GZ_BAD_SPARSE;
    if (!clean_tail(mantissas, used)) return GZ_BAD_SPARSE;
    int end = mantissas_at + (used + 7) / 8;
    if (size - end > 3) return GZ_BAD_SPARSE;
    for (; end < size; end++)
        if (data[end]) return GZ_BAD_SPARSE;
    return 0;
}
