// One block, in the order of docs/format.md. Included once per instruction set, inside a namespace of that name,
// which provides encode_lanes and decode_lanes; the loops here are plain so that the compiler vectorises them for
// the instruction set at hand.
// No include guard and no namespace: see block_scalar.cpp.

#define GZ_RESTRICT __restrict__

// --- What each mode maps a value to ---

inline uint32_t paper_level(uint32_t exponent, int reach) {
    int span = reach - (int(exponent) - 127) - 1;
    uint32_t level = uint32_t(span >= 6) + uint32_t(span >= 12) + uint32_t(span >= 18);
    return reach == kExact || exponent == 255 ? 0 : level;
}

// q(x) for one value; Mode is a constant, so each loop below has only its own branches.
template <int Mode>
inline uint32_t map_value(uint32_t u, int floor, int keep) {
    uint32_t sign = u & 0x80000000u, magnitude = u & 0x7fffffffu, exponent = magnitude >> 23;
    int kept = keep;
    if (Mode == GZ_NEAR) {
        kept = int(exponent) - 127 - floor;
        kept = kept > 23 || floor == kExact ? 23 : kept;
    } else if (Mode == GZ_PAPER) {
        kept = 23 - 6 * int(paper_level(exponent, floor));
    }
    int bounded = kept < 0 ? 0 : kept;
    uint32_t cut = uint32_t(23 - bounded), mask = ~0u << cut, truncated = magnitude & mask, result = truncated;
    if (Mode == GZ_NEAR || Mode == GZ_KEEP) {
        // Ties to even multiples of the grid; with no bit kept the multiple is the implicit 1, which is odd.
        uint32_t odd = cut == 23 ? 1 : magnitude >> cut & 1;
        uint32_t half = (1u << cut) >> 1;
        uint32_t rounded = (magnitude + (cut ? half - 1 + odd : 0)) & mask;
        result = rounded < 0x7f800000u ? rounded : truncated;
        if (Mode == GZ_NEAR) {
            // Below the grid: more than half a step rounds up to one step, the rest to zero.
            uint32_t one_step = uint32_t(floor + 127) << 23;
            uint32_t below = kept == -1 && (magnitude & 0x7fffff) ? one_step : 0;
            result = kept < 0 ? below : result;
        }
    }
    result = exponent == 0 ? 0 : result;
    result = exponent == 255 ? (magnitude > 0x7f800000u ? 0x7fc00000u : 0x7f800000u) : result;
    return result ? result | sign : 0;
}

constexpr int kCut = -1;  // the Mode of map_value that truncates to `keep` bits

inline void map_values(const uint32_t* GZ_RESTRICT x, int n, const gz_job& job, const int8_t* GZ_RESTRICT floor,
                       uint32_t* GZ_RESTRICT q) {
    int keep = job.keep;
    if (job.mode == GZ_KEEP && job.truncate)
        for (int i = 0; i < n; i++) q[i] = map_value<kCut>(x[i], 0, keep);
    else if (job.mode == GZ_KEEP)
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_KEEP>(x[i], 0, keep);
    else if (job.mode == GZ_NEAR)
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_NEAR>(x[i], floor[i], 23);
    else
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_PAPER>(x[i], floor[i], 23);
}

// --- Exponents and their statistics ---

struct Stats {
    uint32_t all_bits = 0;      // or of all values
    uint32_t odd_zeros = 0;     // or of the values with exponent 0
    uint32_t sum = 0, nonzero = 0;
    bool single = false;
    int base = 0;
};

template <typename Word, int MantissaBits>
Stats split_exponents(const Word* GZ_RESTRICT v, int n, uint8_t* GZ_RESTRICT exponent) {
    constexpr uint32_t mask = MantissaBits == 10 ? 31 : 255;
    uint32_t all = 0, odd = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = v[i], e = u >> MantissaBits & mask;
        exponent[i] = uint8_t(e);
        all |= u;
        odd |= e ? 0 : u;
    }
    uint32_t sum = 0, nonzero = 0;
    uint8_t lowest = 255, highest = 0;
    for (int i = 0; i < n; i++) {
        uint8_t e = exponent[i];
        sum += e;
        nonzero += e != 0;
        lowest = e < lowest ? e : lowest;
        highest = e > highest ? e : highest;
    }
    Stats s;
    s.all_bits = all;
    s.odd_zeros = odd;
    s.sum = sum;
    s.nonzero = nonzero;
    s.single = lowest == highest;
    s.base = s.single ? highest : int((sum + nonzero / 2) / nonzero);
    return s;
}

inline Stats split_exponents(const void* values, int n, int dtype, uint8_t* exponent) {
    if (dtype == GZ_FLOAT32) return split_exponents<uint32_t, 23>(static_cast<const uint32_t*>(values), n, exponent);
    const uint16_t* half = static_cast<const uint16_t*>(values);
    return dtype == GZ_BFLOAT16 ? split_exponents<uint16_t, 7>(half, n, exponent)
                                : split_exponents<uint16_t, 10>(half, n, exponent);
}

// --- Fields: byte planes, and the bits that remain ---

// t = field >> (F - w): its low `rest` bits go to `lane`, whole bytes above to planes[0..whole).
template <typename Word, int FieldBits>
void split_fields(const Word* GZ_RESTRICT v, int n, int width, uint8_t* const planes[3], uint8_t* GZ_RESTRICT lane) {
    constexpr int sign_at = 8 * sizeof(Word) - 1;
    constexpr uint32_t mantissa = (1u << (FieldBits - 1)) - 1;
    const int whole = width / 8, rest = width % 8, drop = FieldBits - width;
    auto kept = [=](uint32_t u) { return ((u & mantissa) | (u >> sign_at & 1) << (FieldBits - 1)) >> drop; };
    for (int j = 0; j < whole; j++) {
        uint8_t* GZ_RESTRICT plane = planes[j];
        const int shift = rest + 8 * j;
        for (int i = 0; i < n; i++) plane[i] = uint8_t(kept(v[i]) >> shift);
    }
    if (rest)
        for (int i = 0; i < n; i++) lane[i] = uint8_t(kept(v[i]) & ((1u << rest) - 1));
}

inline void split_fields(const void* values, int n, int dtype, int width, uint8_t* const planes[3], uint8_t* lane) {
    const uint16_t* half = static_cast<const uint16_t*>(values);
    if (dtype == GZ_FLOAT32)
        split_fields<uint32_t, 24>(static_cast<const uint32_t*>(values), n, width, planes, lane);
    else if (dtype == GZ_BFLOAT16)
        split_fields<uint16_t, 8>(half, n, width, planes, lane);
    else
        split_fields<uint16_t, 11>(half, n, width, planes, lane);
}

template <typename Word, int FieldBits>
void join_fields(const uint8_t* GZ_RESTRICT exponent, const uint8_t* const planes[3], const uint8_t* GZ_RESTRICT lane,
                 int n, int width, Word* GZ_RESTRICT v) {
    constexpr int sign_at = 8 * sizeof(Word) - 1;
    constexpr uint32_t mantissa = (1u << (FieldBits - 1)) - 1;
    const int whole = width / 8, rest = width % 8, drop = FieldBits - width;
    const uint8_t *GZ_RESTRICT p0 = planes[0], *GZ_RESTRICT p1 = planes[1], *GZ_RESTRICT p2 = planes[2];
    auto word = [](uint32_t e, uint32_t field) {
        return Word(e << (FieldBits - 1) | (field & mantissa) | (field >> (FieldBits - 1)) << sign_at);
    };
    if (rest == 0) {
        if (whole == 0)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], 0);
        else if (whole == 1)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], uint32_t(p0[i]) << drop);
        else if (whole == 2)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], (p0[i] | uint32_t(p1[i]) << 8) << drop);
        else
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], p0[i] | uint32_t(p1[i]) << 8 | uint32_t(p2[i]) << 16);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint32_t t = lane[i];
        if (whole > 0) t |= uint32_t(p0[i]) << rest;
        if (whole > 1) t |= uint32_t(p1[i]) << (rest + 8);
        v[i] = word(exponent[i], t << drop);
    }
}

// --- Dense block ---

inline int field_width(const Stats& s, int dtype) {
    FloatLayout layout = float_layout(dtype);
    uint32_t mantissa = s.all_bits & ((1u << (layout.field_bits - 1)) - 1);
    if (mantissa) return layout.field_bits - __builtin_ctz(mantissa);
    return int(s.all_bits >> (8 * layout.item_bytes - 1) & 1);
}

// The lane part of near and paper mode: widths and chunks of mapped values; returns the highest chunk that occurs.
template <bool Near>
int split_lane_part(const uint32_t* GZ_RESTRICT q, int n, const int8_t* GZ_RESTRICT floor, uint8_t* GZ_RESTRICT width,
                    uint8_t* GZ_RESTRICT c0, uint8_t* GZ_RESTRICT c1, uint8_t* GZ_RESTRICT c2,
                    uint8_t* GZ_RESTRICT level) {
    uint32_t widest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = q[i], e = u >> 23 & 255;
        int kept = Near ? int(e) - 127 - floor[i] : 23 - 6 * int(paper_level(e, floor[i]));
        if (Near) {
            kept = kept < 0 ? 0 : kept > 23 ? 23 : kept;
            kept = floor[i] == kExact || e == 255 ? 23 : kept;
        }
        uint32_t bits = (u >> 31) << kept | (u & 0x7fffff) >> (23 - kept);
        bits = e ? bits : 0;
        uint32_t w = e ? uint32_t(kept) + 1 : 0;
        width[i] = uint8_t(w);
        c0[i] = uint8_t(w >= 8 ? bits & 255 : bits);
        c1[i] = uint8_t(bits >> 8);
        c2[i] = uint8_t(bits >> 16);
        if (!Near) level[i] = uint8_t(paper_level(e, floor[i]));
        widest = w > widest ? w : widest;
    }
    return int(widest + 7) / 8;
}

inline int encode_dense(const BlockIn& in, const void* values, const Stats& s, uint8_t* out, Scratch& scratch) {
    const int n = in.n;
    int width = 0, fields = int(s.nonzero);
    bool pruned = true;
    LaneInput lanes{n, in.table, s.single, s.base, scratch.exponent, nullptr, 0, scratch.width,
                    {scratch.chunk[0], scratch.chunk[1], scratch.chunk[2]}};
    uint8_t* at = out + kDenseHead;
    if (in.coding == kFixed) {
        pruned = s.odd_zeros == 0;
        if (!pruned) fields = n;
        width = field_width(s, in.job.dtype);
        const int whole = width / 8, rest = width % 8;
        uint8_t* planes[3];
        for (int j = 0; j < 3; j++) planes[j] = fields == n ? at + j * n : scratch.plane[j];
        split_fields(values, n, in.job.dtype, width, planes, scratch.chunk[0]);
        if (fields != n)
            for (int j = 0; j < whole; j++) compress_bytes(scratch.plane[j], scratch.exponent, n, at + j * fields);
        at += whole * fields;
        if (rest) {
            lanes.chunks = 1;
            for (int i = 0; i < n; i++) scratch.width[i] = scratch.exponent[i] || !pruned ? uint8_t(rest) : 0;
        }
    } else {
        const uint32_t* q = static_cast<const uint32_t*>(values);
        uint8_t* const* c = const_cast<uint8_t* const*>(reinterpret_cast<const uint8_t* const*>(lanes.chunk));
        if (in.coding == kNear) {
            lanes.chunks = split_lane_part<true>(q, n, in.floor, scratch.width, c[0], c[1], c[2], nullptr);
        } else {
            lanes.chunks = split_lane_part<false>(q, n, in.floor, scratch.width, c[0], c[1], c[2], scratch.level);
            lanes.level = scratch.level;
        }
    }
    bool escapes = false;
    at = encode_lanes(lanes, out + 4, at, &escapes);
    int size = int(at - out), padding = -size & 3;
    std::memset(at, 0, size_t(padding));
    store32(out, uint32_t(width / 8) | uint32_t(width % 8) << 2 | uint32_t(pruned) << 5 | uint32_t(escapes) << 6 |
                     uint32_t(s.single) << 7 | uint32_t(s.base) << 8 | uint32_t(fields) << 16 | uint32_t(padding) << 30);
    return size + padding;
}

// --- Sparse block ---

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
inline int encode_sparse(const BlockIn& in, const uint32_t* q, const Stats& s, uint8_t* out, const uint8_t* exponent) {
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

// --- Which kind a block gets ---

BlockOut encode_block(const BlockIn& in, uint8_t* out, Scratch& scratch) {
    const void* values = in.values;
    const int item = float_layout(in.job.dtype).item_bytes;
    if (in.job.dtype == GZ_FLOAT32 && in.job.mode != GZ_LOSSLESS) {
        map_values(static_cast<const uint32_t*>(values), in.n, in.job, in.floor, scratch.mapped);
        values = scratch.mapped;
    }
    Stats s = split_exponents(values, in.n, in.job.dtype, scratch.exponent);
    if (s.all_bits == 0) return {kSparse, 0};
    if (in.coding == kNear) {
        int size = encode_sparse(in, static_cast<const uint32_t*>(values), s, out, scratch.exponent);
        if (size >= 0) return {kSparse, size};
    }
    const int raw = (in.n * item + 3) / 4 * 4;
    const int dense = encode_dense(in, values, s, out, scratch);
    if (dense < raw) return {kDense, dense};
    std::memcpy(out, values, size_t(in.n) * size_t(item));
    std::memset(out + in.n * item, 0, size_t(raw - in.n * item));
    return {kRaw, raw};
}

void sample_block(const BlockIn& in, int64_t* counts, Scratch& scratch) {
    const int item = float_layout(in.job.dtype).item_bytes;
    int sampled = 0;
    alignas(64) uint32_t picked[kBlock / kSampleRows];
    uint8_t* bytes = reinterpret_cast<uint8_t*>(picked);
    for (int start = 0; start < in.n; start += kSampleRows * kLanes) {
        int here = in.n - start < kLanes ? in.n - start : kLanes;
        const uint8_t* source = static_cast<const uint8_t*>(in.values) + size_t(start) * size_t(item);
        if (in.job.dtype == GZ_FLOAT32 && in.job.mode != GZ_LOSSLESS) {
            uint32_t row[kLanes];
            std::memcpy(row, source, size_t(here) * 4);
            map_values(row, here, in.job, in.floor ? in.floor + start : nullptr, picked + sampled);
        } else {
            std::memcpy(bytes + sampled * item, source, size_t(here * item));
        }
        sampled += here;
    }
    Stats s = split_exponents(picked, sampled, in.job.dtype, scratch.exponent);
    if (s.sum == 0) return;
    const int base = s.single ? s.base : int((s.sum + s.nonzero / 2) / s.nonzero);
    // Two histograms, so that equal neighbours do not wait for each other.
    uint32_t even[256] = {0}, odd[256] = {0};
    int i = 0;
    for (; i + 1 < sampled; i += 2) {
        even[scratch.exponent[i]]++;
        odd[scratch.exponent[i + 1]]++;
    }
    if (i < sampled) even[scratch.exponent[i]]++;
    for (int e = 0; e < 256; e++)
        if (even[e] | odd[e]) counts[symbol_of(e, base)] += even[e] + odd[e];
}

// --- Decoding ---

struct DenseHead {
    int width, base, fields, padding;
    bool pruned, escapes, single;
};

inline int read_dense(const BlockData& b, int n, int dtype, Coding coding, DenseHead* h, LaneOutput* lanes) {
    FloatLayout layout = float_layout(dtype);
    if (b.size < kDenseHead) return GZ_BAD_DENSE;
    uint32_t head = load32(b.data);
    h->width = int(8 * (head & 3) + (head >> 2 & 7));
    h->pruned = head >> 5 & 1;
    h->escapes = head >> 6 & 1;
    h->single = head >> 7 & 1;
    h->base = int(head >> 8 & 255);
    h->fields = int(head >> 16 & 0x3fff);
    h->padding = int(head >> 30);
    int whole = h->width / 8, refill_at = kDenseHead + whole * h->fields, end = b.size - h->padding;
    if (h->width > layout.field_bits || (coding != kFixed && (h->width || !h->pruned))) return GZ_BAD_DENSE;
    if (h->base >> layout.exponent_bits || h->fields > n || (h->single && h->escapes)) return GZ_BAD_DENSE;
    if (refill_at > end) return GZ_BAD_DENSE;
    for (int i = end; i < b.size; i++)
        if (b.data[i]) return GZ_BAD_DENSE;
    lanes->n = n;
    lanes->single = h->single;
    lanes->escapes = h->escapes;
    lanes->pruned = h->pruned;
    lanes->base = h->base;
    lanes->coding = coding;
    lanes->rest = h->width % 8;
    lanes->states = b.data + 4;
    lanes->refill = b.data + refill_at;
    lanes->end = b.data + end;
    return 0;
}

template <bool Near>
void join_lane_part(const uint8_t* GZ_RESTRICT exponent, const uint8_t* GZ_RESTRICT c0, const uint8_t* GZ_RESTRICT c1,
                    const uint8_t* GZ_RESTRICT c2, const int8_t* GZ_RESTRICT floor, const uint8_t* GZ_RESTRICT level,
                    int n, uint32_t* GZ_RESTRICT q) {
    for (int i = 0; i < n; i++) {
        int e = exponent[i], kept;
        if (Near) {
            kept = e - 127 - floor[i];
            kept = kept < 0 ? 0 : kept > 23 ? 23 : kept;
            kept = floor[i] == kExact || e == 255 ? 23 : kept;
        } else {
            kept = 23 - 6 * level[i];
        }
        uint32_t bits = c0[i] | uint32_t(c1[i]) << 8 | uint32_t(c2[i]) << 16;
        uint32_t mantissa = (bits & ((1u << kept) - 1)) << (23 - kept);
        uint32_t value = (bits >> kept) << 31 | uint32_t(e) << 23 | mantissa;
        q[i] = e ? value : 0;
    }
}

// Checks the decoded exponents of a dense block and puts its values together.
inline int finish_dense(const BlockData& b, const DenseHead& h, int n, int dtype, Coding coding, const int8_t* floor,
                        void* values, Scratch& s) {
    uint32_t all = 0, nonzero = 0;
    for (int i = 0; i < n; i++) {
        all |= s.exponent[i];
        nonzero += s.exponent[i] != 0;
    }
    if (all >> float_layout(dtype).exponent_bits) return GZ_BAD_DENSE;
    int expected = h.pruned ? int(nonzero) : n;
    if (expected != h.fields) return GZ_BAD_FIELDS;
    if (coding == kNear) {
        join_lane_part<true>(s.exponent, s.chunk[0], s.chunk[1], s.chunk[2], floor, nullptr, n, static_cast<uint32_t*>(values));
        return 0;
    }
    if (coding == kPaper) {
        join_lane_part<false>(s.exponent, s.chunk[0], s.chunk[1], s.chunk[2], nullptr, s.level, n, static_cast<uint32_t*>(values));
        return 0;
    }
    const uint8_t* planes[3];
    for (int j = 0; j < 3; j++) {
        planes[j] = b.data + kDenseHead + j * h.fields;
        if (h.fields != n && j < h.width / 8) {
            expand_bytes(planes[j], h.fields, s.exponent, n, s.plane[j]);
            planes[j] = s.plane[j];
        }
    }
    if (dtype == GZ_FLOAT32)
        join_fields<uint32_t, 24>(s.exponent, planes, s.chunk[0], n, h.width, static_cast<uint32_t*>(values));
    else if (dtype == GZ_BFLOAT16)
        join_fields<uint16_t, 8>(s.exponent, planes, s.chunk[0], n, h.width, static_cast<uint16_t*>(values));
    else
        join_fields<uint16_t, 11>(s.exponent, planes, s.chunk[0], n, h.width, static_cast<uint16_t*>(values));
    return 0;
}

inline void add_floats(const float* GZ_RESTRICT from, int n, float* GZ_RESTRICT to) {
    for (int i = 0; i < n; i++) to[i] += from[i];
}

// 16-bit sums: through float and back, rounding to nearest even as torch does.
inline float half_to_float(uint16_t h, int dtype) {
    uint32_t bits;
    if (dtype == GZ_BFLOAT16) {
        bits = uint32_t(h) << 16;
    } else {
        uint32_t sign = uint32_t(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
        if (e == 31) {
            bits = sign | 0x7f800000u | m << 13;
        } else if (e) {
            bits = sign | (e + 112) << 23 | m << 13;
        } else {
            float tiny = float(m) * (1.0f / 16777216.0f);
            std::memcpy(&bits, &tiny, 4);
            bits |= sign;
        }
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t float_to_half(float f, int dtype) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if (dtype == GZ_BFLOAT16) {
        if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
        return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    uint32_t sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00);  // 65536 and above
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 puts the bits where they belong, rounded
        float shifted;
        std::memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    return uint16_t(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline void deliver(const void* values, int n, int dtype, void* out, bool add, bool stream) {
    if (!add) {
        copy_out(out, values, size_t(n) * size_t(float_layout(dtype).item_bytes), stream);
    } else if (dtype == GZ_FLOAT32) {
        add_floats(static_cast<const float*>(values), n, static_cast<float*>(out));
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(values);
        uint16_t* to = static_cast<uint16_t*>(out);
        for (int i = 0; i < n; i++) to[i] = float_to_half(half_to_float(to[i], dtype) + half_to_float(from[i], dtype), dtype);
    }
}

int decode_pair(const BlockData block[2], const int n[2], int dtype, Coding coding, const CodeTable* table[2],
                const int8_t* floor[2], void* out[2], bool add, bool stream, Scratch scratch[2]) {
    const int item = float_layout(dtype).item_bytes;
    DenseHead head[2];
    LaneOutput lanes[2];
    int dense[2], dense_count = 0;
    for (int k = 0; k < 2 && n[k]; k++) {
        const BlockData& b = block[k];
        Scratch& s = scratch[k];
        if (b.kind == kDense) {
            lanes[dense_count] = {};
            if (int error = read_dense(b, n[k], dtype, coding, &head[k], &lanes[dense_count])) return error;
            LaneOutput& o = lanes[dense_count];
            o.table = table[k];
            o.floor = floor[k];
            o.exponent = s.exponent;
            o.level = s.level;
            for (int c = 0; c < 3; c++) o.chunk[c] = s.chunk[c];
            dense[dense_count++] = k;
        } else if (b.kind == kRaw) {
            int size = n[k] * item;
            if (b.size != (size + 3) / 4 * 4) return GZ_BAD_RAW;
            for (int i = size; i < b.size; i++)
                if (b.data[i]) return GZ_BAD_RAW;
            std::memcpy(s.mapped, b.data, size_t(size));
            deliver(s.mapped, n[k], dtype, out[k], add, stream);
        } else if (b.size == 0) {
            if (!add) std::memset(out[k], 0, size_t(n[k]) * size_t(item));
        } else {
            if (coding != kNear) return GZ_BAD_KIND;
            if (int error = decode_sparse(b.data, b.size, n[k], floor[k], s.mapped)) return error;
            deliver(s.mapped, n[k], dtype, out[k], add, stream);
        }
    }
    if (int error = decode_dense_lanes(lanes, dense_count)) return error;
    for (int i = 0; i < dense_count; i++) {
        int k = dense[i];
        if (int error = finish_dense(block[k], head[k], n[k], dtype, coding, floor[k], scratch[k].mapped, scratch[k]))
            return error;
        deliver(scratch[k].mapped, n[k], dtype, out[k], add, stream);
    }
    return 0;
}

// --- Floors ---

void floors(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* GZ_RESTRICT out) {
    if (rule.given) {
        const int8_t* GZ_RESTRICT given = rule.given + start;
        for (int i = 0; i < n; i++) {
            int f = given[i] + shift;
            out[i] = int8_t(given[i] == kExact ? kExact : f > 127 ? 127 : f);
        }
        return;
    }
    const int c0 = rule.c0, c1 = rule.c1, c2 = rule.c2;
    auto finish = [=](int theta, int f) {
        f = theta == 0 || f < -127 ? kExact : f > 127 ? 127 : f;
        int shifted = f + shift;
        return int8_t(f == kExact ? kExact : shifted > 127 ? 127 : shifted);
    };
    const uint8_t* theta = reinterpret_cast<const uint8_t*>(rule.theta + start);
    const uint8_t* second = reinterpret_cast<const uint8_t*>(rule.second + (rule.second ? start : 0));
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, theta + 4 * i, 4);
        int e = int(bits >> 23 & 255), f = e + c0;
        if (rule.second) {
            std::memcpy(&bits, second + 4 * i, 4);
            int v = int(bits >> 23 & 255) + c1;
            f += (v > c2 ? v : c2) >> 1;
        }
        out[i] = finish(e, f);
    }
}

#undef GZ_RESTRICT
