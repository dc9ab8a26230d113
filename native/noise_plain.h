// The stages of the codec noise in plain C++. Included by every instruction set inside its own namespace, so that each
// has a copy compiled for it; what an instruction set does better, it defines itself.

inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
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
    const float k = std::floor(t);
    const float above = (t - k) * 16777216.0f;
    const uint32_t draw = (mix((how.first + number) ^ how.key) + how.add) >> 8;
    // Only a finite t gets here with a number; 2^24 - draw is exact.
    const float q = above >= float(int32_t(16777216u - draw)) ? k + 1.0f : k;
    return q == 0 ? 0.0f : q;
}

inline double squares_plain(const uint8_t* x, int n) {
    double lane[32] = {};
    for (int i = 0; i < n; i++) {
        const double value = value_at<float>(x, i);
        lane[i % 32] += value * value;
    }
    for (int half = 16; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
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

inline bool pack_plain(const int8_t* q, int rows, int low, int reach, uint8_t* pairs, uint8_t* planes, uint64_t* escaped) {
    const int add = (1 << low >> 1) + (reach << low), most = ((2 * reach + 1) << low) - 1;
    uint64_t any = 0;
    for (int g = 0; g < 2 * rows; g++) {
        uint64_t mask = 0, bits[3] = {};
        for (int i = 0; i < 64; i += 2) {
            uint8_t digit[2];
            for (int j = 0; j < 2; j++) {
                const int v = uint8_t(q[64 * g + i + j] + add);
                const bool out = v > most;
                digit[j] = out ? kEscape : uint8_t(v >> low);
                mask |= uint64_t(out) << (i + j);
                const int lows = q[64 * g + i + j] == kGiant ? 0 : v;
                for (int b = 0; b < low; b++) bits[b] |= uint64_t(lows >> b & 1) << (i + j);
            }
            pairs[32 * g + i / 2] = uint8_t(digit[0] | digit[1] << 4);
        }
        for (int b = 0; b < low; b++) store64(planes + (g / 2 * low + b) * 16 + g % 2 * 8, bits[b]);
        escaped[g] = mask;
        any |= mask;
    }
    return any != 0;
}

// N lanes at once, so that their latencies overlap.
template <int N>
inline void encode_some(const uint8_t* pairs, int rows, const Table& table, int first, Work& work) {
    uint64_t held[N] = {}, bits[N] = {};
    uint8_t* to[N];
    for (int j = 0; j < N; j++) to[j] = work.lanes[first + j];
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < N; j++) {
            const uint8_t* four = pairs + r * (kRow / 2) + (first + j) * 4;
            uint64_t h = held[j], n = bits[j];  // of n only the low 6 bits count: codes are added to it as well
            for (int k = 0; k < 4; k++) {
                const uint64_t e = table.push[four[k]];
                h |= (e >> 8) << (n & 63);
                n += e;
            }
            n &= 63;
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

template <int N>
inline void decode_some(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits) {
    uint64_t n[N] = {};
    const uint8_t* from[N];
    for (int j = 0; j < N; j++) from[j] = lane[j];
    for (int r = 0; r < rows; r++) {
        uint16_t* to = entries + r * (kRow / 2);
        for (int j = 0; j < N; j++) {
            uint64_t w = load64(from[j] + (n[j] >> 3)) >> (n[j] & 7);
            uint32_t used = 0;
            for (int k = 0; k < 4; k++) {
                const uint32_t e = table.entry[w & ((1 << kLimit) - 1)];
                w >>= e & 63;
                used += e;
                to[4 * j + k] = uint16_t(e);
            }
            n[j] += used & 255;
        }
    }
    for (int j = 0; j < N; j++) bits[j] = n[j];
}

template <int N>
inline void decode_lanes_by(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits) {
    for (int j = 0; j < kLanes; j += N) decode_some<N>(lane + j, rows, table, entries + 4 * j, bits + j);
}

inline bool unpack_plain(const uint16_t* entries, int rows, int low, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const int less = (1 << low >> 1) + (reach << low);
    uint64_t any = 0;
    for (int g = 0; g < 2 * rows; g++) {
        uint64_t mask = 0, bits[3] = {};
        for (int b = 0; b < low; b++) bits[b] = load64(planes + (g / 2 * low + b) * 16 + g % 2 * 8);
        for (int i = 0; i < 64; i++) {
            const int digit = entries[32 * g + i / 2] >> (8 + i % 2 * 4) & 15;
            int v = digit << low;
            for (int b = 0; b < low; b++) v |= int(bits[b] >> i & 1) << b;
            q[64 * g + i] = int8_t(v - less);
            mask |= uint64_t(digit == kEscape) << i;
        }
        escaped[g] = mask;
        any |= mask;
    }
    return any != 0;
}

// One decoded value to its place.
inline void deliver_one(float value, const Target& target, int i) {
    if (target.delivery == kAdd) value = value_at<float>(target.out, i) + value;
    if (target.delivery == kDivide) value = value / target.divisor;
    put_value(target.out, i, value);
}

inline void deliver_plain(const int8_t* q, int from, int n, const Target& target) {
    for (int i = from; i < n; i++) {
        float value = float(q[i]) * target.level;
        if (target.shape) value *= power_of_two(target.shape[i]);
        deliver_one(value, target, i);
    }
}
