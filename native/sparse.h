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

// Returns the size of the sparse form, or -1 where another form is chosen.
inline int encode_sparse(const BlockIn& in, const Split& split, uint8_t* out, Scratch& scratch) {
    const Stats& s = split.stats;
    const uint8_t* exponent = scratch.exponent;
    const int n = in.n, m = int(s.nonzero);
    if (2 * m > n) return -1;
    const int low = low_bits(m, n);
    uint16_t position[kBlock / 2 + 32];
    uint8_t kept[kBlock / 2];
    uint16_t distance[kBlock / 2];
    find_nonzero(exponent, n, position);

    auto code_cost_of = [&](int e) {
        int length = in.table->length[symbol_of(e, s.base)];
        return (length & 15) + (length & kEscaped ? 8 : 0);
    };
    int64_t total = 0, kept_sum = 0, code_cost = s.single ? 0 : int64_t(code_cost_of(0)) * (n - m);
    for (int i = 0; i < m; i++) {
        int p = position[i], e = exponent[p], k = kept_near(e, in.floor[p]), d = e - 127 - in.floor[p];
        total += d;
        kept_sum += k;
        if (!s.single) code_cost += code_cost_of(e);
        kept[i] = uint8_t(k);
        distance[i] = uint16_t(d);
    }
    if (total > 65535) return -1;
    const int64_t low_count = m * (low + 1), high_count = m + ((n - 1) >> low), unary_count = m + total;
    if (32 + low_count + high_count + unary_count + kept_sum >= 544 + code_cost + m + kept_sum) return -1;
    auto bytes = [](int64_t bits) { return (bits + 7) / 8; };
    int64_t size = 4 + bytes(low_count) + bytes(high_count) + bytes(unary_count) + bytes(kept_sum);
    if ((size + 3) / 4 >= n) return -1;  // no shorter than raw

    // Sign and mantissa come from the lane part where that is made already.
    uint32_t field[kBlock / 2];  // sign in bit 31, the kept mantissa bits below
    if (split.chunks >= 0) {
        for (int i = 0; i < m; i++) {
            int p = position[i];
            uint32_t bits = scratch.chunk[0][p] | uint32_t(scratch.chunk[1][p]) << 8 | uint32_t(scratch.chunk[2][p]) << 16;
            field[i] = (bits >> kept[i]) << 31 | (bits & ((1u << kept[i]) - 1));
        }
    } else {
        const uint32_t* q = static_cast<const uint32_t*>(split.values);
        for (int i = 0; i < m; i++) field[i] = (q[position[i]] & 0x80000000u) | (q[position[i]] & 0x7fffff) >> (23 - kept[i]);
    }
    store16(out, unsigned(m));
    store16(out + 2, unsigned(total));
    BitWriter writer{out + 4};
    for (int i = 0; i < m; i++) writer.put(field[i] >> 31 | uint32_t(position[i] & ((1 << low) - 1)) << 1, low + 1);
    writer.finish();
    int next = 0;
    for (int i = 0; i < m; i++) {
        int bit = (position[i] >> low) + i;
        writer.one_after(bit - next);
        next = bit + 1;
    }
    for (; next < int(high_count); next += 32) writer.put(0, int(high_count) - next < 32 ? int(high_count) - next : 32);
    writer.finish();
    for (int i = 0; i < m; i++) writer.one_after(distance[i]);
    writer.finish();
    for (int i = 0; i < m; i++) writer.put(field[i] & 0x7fffffff, kept[i]);
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
