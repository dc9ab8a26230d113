// The sparse form of near mode (docs/format.md, "Sparse block"). Included like values.h.

struct BitWriter {
    uint8_t* at;
    uint64_t held = 0;
    int count = 0;
    void put(uint64_t bits, int n) {  // n <= 32
        held |= bits << count;
        count += n;
        while (count >= 8) {
            *at++ = uint8_t(held);
            held >>= 8;
            count -= 8;
        }
    }
    void finish() {
        if (count) *at++ = uint8_t(held);
        held = 0;
        count = 0;
    }
};

inline int low_bits(int m, int n) { return 31 - __builtin_clz(uint32_t(n / m)); }

// Returns the size of the sparse form, or -1 where the dense form is chosen.
inline int encode_sparse(const BlockIn& in, const Split& split, uint8_t* out, Scratch& scratch) {
    const Stats& s = split.stats;
    const uint8_t* exponent = scratch.exponent;
    const int n = in.n, m = int(s.nonzero);
    if (2 * m > n) return -1;
    const int low = low_bits(m, n);
    int64_t total = 0, kept_sum = 0, code_cost = 0;
    uint16_t position[kBlock / 2 + 1];
    int found = 0;
    for (int i = 0; i < n; i++) {
        position[found < m ? found : m] = uint16_t(i);
        found += exponent[i] != 0;
    }
    for (int i = 0; i < m; i++) {
        int p = position[i], e = exponent[p];
        total += e - 127 - in.floor[p];
        kept_sum += kept_near(e, in.floor[p]);
    }
    if (total > 65535) return -1;
    if (!s.single) {
        auto cost = [&](int e) {
            int length = in.table->length[symbol_of(e, s.base)];
            return (length & 15) + (length & kEscaped ? 8 : 0);
        };
        code_cost = int64_t(cost(0)) * (n - m);
        for (int i = 0; i < m; i++) code_cost += cost(exponent[position[i]]);
    }
    int64_t sparse_bits = 32 + m * (low + 1) + m + ((n - 1) >> low) + m + total + kept_sum;
    int64_t dense_bits = 544 + code_cost + m + kept_sum;
    if (sparse_bits >= dense_bits) return -1;
    auto bytes = [](int64_t bits) { return (bits + 7) / 8; };
    int64_t size = 4 + bytes(m * (low + 1)) + bytes(m + ((n - 1) >> low)) + bytes(m + total) + bytes(kept_sum);
    if ((size + 3) / 4 >= n) return -1;  // no shorter than raw

    const uint32_t* q = static_cast<const uint32_t*>(mapped_values(in, split, scratch));
    store16(out, unsigned(m));
    store16(out + 2, unsigned(total));
    BitWriter writer{out + 4};
    for (int i = 0; i < m; i++) {
        int p = position[i];
        writer.put(q[p] >> 31 | uint32_t(p & ((1 << low) - 1)) << 1, low + 1);
    }
    writer.finish();
    int next = 0;
    for (int i = 0; i < m; i++) {
        int bit = (position[i] >> low) + i;
        for (; bit - next >= 32; next += 32) writer.put(0, 32);
        writer.put(uint64_t(1) << (bit - next), bit - next + 1);
        next = bit + 1;
    }
    for (int end = m + ((n - 1) >> low); next < end;) {
        int step = end - next < 32 ? end - next : 32;
        writer.put(0, step);
        next += step;
    }
    writer.finish();
    for (int i = 0; i < m; i++) {
        int distance = exponent[position[i]] - 127 - in.floor[position[i]];
        for (; distance >= 32; distance -= 32) writer.put(0, 32);
        writer.put(uint64_t(1) << distance, distance + 1 <= 32 ? distance + 1 : 32);
    }
    writer.finish();
    for (int i = 0; i < m; i++) {
        int p = position[i], kept = kept_near(exponent[p], in.floor[p]);
        writer.put((q[p] & 0x7fffff) >> (23 - kept), kept);
    }
    writer.finish();
    while ((writer.at - out) & 3) *writer.at++ = 0;
    return int(writer.at - out);
}

// Reads bits of one section; a section ends at a byte boundary.
struct BitReader {
    const uint8_t* data;
    int at = 0;  // bit
    bool bit(int i) const { return data[i >> 3] >> (i & 7) & 1; }
    uint32_t take(int n) {
        uint32_t value = 0;
        for (int got = 0; got < n;) {
            int offset = at & 7, step = 8 - offset < n - got ? 8 - offset : n - got;
            value |= (uint32_t(data[at >> 3] >> offset) & ((1u << step) - 1)) << got;
            got += step;
            at += step;
        }
        return value;
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
    const uint8_t* lows = data + 4;
    const uint8_t* highs = lows + (low_count + 7) / 8;
    const uint8_t* unary = highs + (high_count + 7) / 8;
    const uint8_t* mantissas = unary + (unary_count + 7) / 8;
    const uint8_t* end = data + size;
    if (mantissas > end) return GZ_BAD_SPARSE;
    if (!clean_tail(lows, low_count) || !clean_tail(highs, high_count) || !clean_tail(unary, unary_count))
        return GZ_BAD_SPARSE;
    std::memset(q, 0, size_t(n) * 4);
    BitReader low_reader{lows}, high{highs}, length{unary}, mantissa{mantissas};
    const int mantissa_bits = int(end - mantissas) * 8;
    int high_at = 0, unary_at = 0, previous = -1;
    for (int i = 0; i < m; i++) {
        while (high_at < high_count && !high.bit(high_at)) high_at++;
        int distance = 0;
        while (unary_at < unary_count && !length.bit(unary_at)) unary_at++, distance++;
        if (high_at == high_count || unary_at == unary_count) return GZ_BAD_SPARSE;
        uint32_t field = low_reader.take(low + 1);
        int p = (high_at - i) << low | int(field >> 1);
        high_at++;
        unary_at++;
        if (p <= previous || p >= n) return GZ_BAD_SPARSE;
        previous = p;
        int e = distance + 127 + floor[p];
        if (e < 1 || e > 255) return GZ_BAD_SPARSE;
        int kept = kept_near(e, floor[p]);
        if (mantissa.at + kept > mantissa_bits) return GZ_BAD_SPARSE;
        q[p] = (field & 1) << 31 | uint32_t(e) << 23 | mantissa.take(kept) << (23 - kept);
    }
    if (unary_at != unary_count) return GZ_BAD_SPARSE;
    for (; high_at < high_count; high_at++)
        if (high.bit(high_at)) return GZ_BAD_SPARSE;
    if (!clean_tail(mantissas, mantissa.at)) return GZ_BAD_SPARSE;
    const uint8_t* used = mantissas + (mantissa.at + 7) / 8;
    if (end - used > 3) return GZ_BAD_SPARSE;
    for (; used < end; used++)
        if (*used) return GZ_BAD_SPARSE;
    return 0;
}

