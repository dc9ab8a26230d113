// The stages of the codec noise in plain C++. Included by every instruction set inside its own namespace, so that each
// has a copy compiled for it; what an instruction set does better, it defines itself.

constexpr uint32_t kMix = 0x7feb352du, kMixAgain = 0x846ca68bu;

inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * kMix;
    x = (x ^ x >> 15) * kMixAgain;
    return x ^ x >> 16;
}

inline float power_of_two(int exponent) {  // -126 to 127
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The integer of one value as a float, which holds all of them.
inline float rounded(float x, const Rounding& how, uint32_t number) {
    float t = x * how.scale;
    if (how.shape) t *= power_of_two(-how.shape[number]);
    if (!(std::fabs(t) < 8388608.0f)) return t;  // an integer already, or not finite
    // In integers, so that no branch is left: half of all would be guessed wrong.
    int32_t k = int32_t(t);
    k -= float(k) > t;
    const uint32_t draw = (mix((how.first + number) ^ how.key) + how.add) >> 8;
    k += (t - float(k)) * 16777216.0f >= float(int32_t(16777216u - draw));  // both sides are exact
    return float(k);
}

// Where vectors may round in fixed point: F = x (scale 2^(24 - d)) to an int32, which counts units of 2^-24 of an integer,
// and q = (F + draw) >> 24. With |t| >= 1/2 F is whole. Below that the format's t - floor t is exact for positive t, so that
// F is rounded down; for negative t it is rounded to nearest, and F with it. Scales are far from the ends of float32 here,
// and 32 values from an index that is a multiple of 32 share the first product of the mix but for a constant.
inline bool in_fixed_point(const Rounding& how) { return how.first % 32 == 0 && how.scale > 0x1p-100f && how.scale < 0x1p80f; }

// Fetches what the 32 values from i on are followed by into the cache: rounding stops at every block to code it, and the
// processor's own prefetching begins anew each time. Beyond the end of a tensor its neighbour lies, or nothing happens.
constexpr int kAhead = 2048;  // values
template <bool kShaped>
inline void fetch_ahead(const uint8_t* x, const int8_t* shape, int i) {
    __builtin_prefetch(x + 4 * (i + kAhead), 0, 2);
    __builtin_prefetch(x + 4 * (i + kAhead) + 64, 0, 2);
    if (kShaped && i % 64 == 0) __builtin_prefetch(shape + i + kAhead, 0, 2);
}

inline double squares_plain(const uint8_t* x, int n) {
    double lane[32] = {};
    for (int i = 0; i < n; i += 32) {
        const int here = n - i < 32 ? n - i : 32;
        for (int j = 0; j < here; j++) {
            const double value = value_at<float>(x, i + j);
            lane[j] += value * value;
        }
    }
    for (int half = 16; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

inline uint64_t weights_plain(const int8_t* shape, uint64_t n) {
    uint64_t count[13] = {}, sum = 0;
    for (uint64_t i = 0; i < n; i++) count[shape[i] < -12 ? 0 : shape[i] > 0 ? 12 : shape[i] + 12]++;
    for (int j = 0; j < 13; j++) sum += count[j] << (2 * j);
    return sum;
}

// The bits of the largest of n second moments: those of negative ones and NaN are above infinity's.
inline uint32_t largest_plain(const float* x, uint64_t n) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        most = bits > most ? bits : most;
    }
    return most;
}

// Half the exponent of each second moment, less that of the largest one.
inline void shape_plain(const float* x, uint64_t n, uint32_t largest, int8_t* shape) {
    const int top = int(largest >> 24);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        const int d = int(bits >> 24) - top;
        shape[i] = int8_t(d < -12 ? -12 : d);
    }
}

inline void round_plain(const uint8_t* x, int from, int n, const Rounding& how, int at, Work& work) {
    for (int i = from; i < n; i++) {
        const float q = rounded(value_at<float>(x, i), how, uint32_t(i));
        const bool giant = !(std::fabs(q) <= float(kNarrowMost));
        work.q[at + i] = giant ? int8_t(kGiant) : int8_t(int(q));
        if (giant) work.giants[work.giant_count++] = {at + i, q};
    }
}

inline uint64_t scan_plain(const int8_t* q, int rows, uint64_t* nonzero) {
    uint64_t total = 0, mask = 0;
    for (int r = 0; r < rows; r++) {
        uint32_t sum = 0;
        for (int i = 0; i < kRow; i++) sum += uint32_t(q[r * kRow + i] < 0 ? -int(q[r * kRow + i]) : int(q[r * kRow + i]));
        total += sum;
        mask |= uint64_t(sum != 0) << r;
    }
    *nonzero = mask;
    return total;
}

// Bit `bit` of eight bytes, that of the first byte lowest; and the same for 64 bytes.
inline uint64_t bits_of(uint64_t bytes, int bit) {
    return ((bytes >> bit & 0x0101010101010101u) * 0x0102040810204080u) >> 56;
}
inline uint64_t plane_of(const uint8_t* bytes, int bit) {
    uint64_t plane = 0;
    for (int i = 0; i < 8; i++) plane |= bits_of(load64(bytes + 8 * i), bit) << (8 * i);
    return plane;
}

// Appends escapes among 64 integers to their list; returns its end.
inline uint8_t* put_escapes(const int8_t* q, uint64_t escaped, int low, uint8_t* list) {
    for (; escaped; escaped &= escaped - 1) {
        const int v = q[__builtin_ctzll(escaped)];
        *list++ = uint8_t(v == kGiant ? kGiant : (v + (1 << low >> 1)) >> low);
    }
    return list;
}

inline int pack_plain(const int8_t* q, int rows, int low, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes) {
    const int add = (1 << low >> 1) + (reach << low), most = ((2 * reach + 1) << low) - 1;
    uint8_t* list = escapes;
    for (int g = 0; g < 2 * rows; g++) {
        uint8_t lows[64], digit[64], out[64];
        for (int i = 0; i < 64; i++) {
            const uint8_t v = uint8_t(q[64 * g + i] + add);
            out[i] = v > most;
            digit[i] = v > most ? uint8_t(kEscape) : uint8_t(v >> low);
            lows[i] = q[64 * g + i] == kGiant ? uint8_t(0) : v;
        }
        for (int i = 0; i < 32; i++) pairs[32 * g + i] = uint8_t(digit[2 * i] | digit[2 * i + 1] << 4);
        for (int b = 0; b < low; b++) store64(planes + (g / 2 * low + b) * 16 + g % 2 * 8, plane_of(lows, b));
        list = put_escapes(q + 64 * g, plane_of(out, 0), low, list);
    }
    return int(list - escapes);
}

// N lanes at once, so that their latencies overlap.
template <int N>
inline void encode_some(const uint8_t* pairs, int rows, const Table& table, int first, Work& work) {
    uint64_t held[N] = {}, bits[N] = {};
    uint8_t* to[N];
    for (int j = 0; j < N; j++) to[j] = work.lanes[first + j];
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            const uint8_t* four = pairs + r * (kRow / 2) + (first + j) * 4;
            uint64_t h = held[j], n = bits[j];  // 7 bits and four codes at most: 55
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                h |= uint64_t(table.code[four[k]]) << (n & 63);
                n += table.length[four[k]];
            }
            store64(to[j], h);
            to[j] += n >> 3;
            held[j] = h >> (n & 56);
            bits[j] = n & 7;
        }
    }
    for (int j = 0; j < N; j++) work.length[first + j] = int(to[j] - work.lanes[first + j]) + (bits[j] != 0);
}

inline void encode_lanes_plain(const uint8_t* pairs, int rows, const Table& table, Work& work) {
    for (int lane = 0; lane < kLanes; lane += 2) encode_some<2>(pairs, rows, table, lane, work);
}

// N lanes in lockstep, code by code: a lane waits for its look-up, and the others fill the time. Of each lane only what is
// left of 64 bits is held; a marker above them counts what was taken.
// beside() is called with every row, for work that fills the time further.
template <int N, typename Beside>
inline void decode_some(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits, Beside beside) {
    const uint8_t* base = lane[0];
    const uint16_t* entry = table.entry;
    uint64_t at[N], left[N];
    for (int j = 0; j < N; j++) at[j] = uint64_t(lane[j] - base) * 8;
    for (int r = 0; r < rows; r++, entries += kRow / 2) {
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) left[j] = load64(base + (at[j] >> 3)) >> (at[j] & 7) | uint64_t(1) << 63;
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) {
                const uint32_t e = entry[left[j] & ((1 << kLimit) - 1)];
                left[j] >>= e & 63;
                entries[4 * j + k] = uint16_t(e);
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) at[j] += uint64_t(__builtin_clzll(left[j]));
        beside();
    }
    for (int j = 0; j < N; j++) bits[j] = at[j] - uint64_t(lane[j] - base) * 8;
}

template <int N, typename Beside>
inline void decode_lanes_by(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits, Beside beside) {
    for (int j = 0; j < kLanes; j += N) decode_some<N>(lane + j, rows, table, entries + 4 * j, bits + j, beside);
}

inline int unpack_plain(const uint16_t* entries, int rows, int low, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const int less = (1 << low >> 1) + (reach << low);
    int escapes = 0;
    for (int g = 0; g < 2 * rows; g++) {
        uint8_t digit[64], out[64], lows[64] = {};
        for (int i = 0; i < 32; i++) {
            digit[2 * i] = entries[32 * g + i] >> 8 & 15;
            digit[2 * i + 1] = uint8_t(entries[32 * g + i] >> 12);
        }
        for (int b = 0; b < low; b++) {
            const uint8_t* plane = planes + (g / 2 * low + b) * 16 + g % 2 * 8;
            for (int i = 0; i < 64; i++) lows[i] = uint8_t(lows[i] | (plane[i / 8] >> i % 8 & 1) << b);
        }
        for (int i = 0; i < 64; i++) {
            q[64 * g + i] = int8_t((digit[i] << low | lows[i]) - less);
            out[i] = digit[i] == kEscape;
        }
        escaped[g] = plane_of(out, 0);
        escapes += __builtin_popcountll(escaped[g]);
    }
    return escapes;
}

// One decoded value to its place.
inline void deliver_one(float value, const Target& target, int i) {
    if (target.delivery == kPut) value *= target.factor;
    if (target.delivery == kAdd) value = value_at<float>(target.out, i) + value;
    if (target.delivery == kDivide) value = value / target.divisor;
    put_value(target.out, i, value);
}

inline void deliver_plain(const int8_t* q, int from, int n, const Target& target) {
    for (int i = from; i < n; i++) {
        const float power = target.shape ? power_of_two(target.shape[i]) : 1.0f, value = float(q[i]) * target.level * power;
        if (target.squares) {
            target.squares->lane[i % 32] += float(q[i]) * power * (float(q[i]) * power);
            target.squares->finite &= std::isfinite(value);
        }
        deliver_one(value, target, i);
    }
}

// Where q times level times 2^d times factor may be one product: all powers of two in it are exact, and nothing overflows.
inline bool in_one_product(const Target& t) { return t.level * t.factor > 0x1p-100f && t.level < 0x1p100f; }

inline void accumulate_plain(const uint8_t* x, int n, float* sum) {
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        fetch_ahead<false>(x, nullptr, i);
        for (int j = i; j < i + 32; j++) sum[j] += value_at<float>(x, j);
    }
    for (; i < n; i++) sum[i] += value_at<float>(x, i);
}
