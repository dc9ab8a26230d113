// Block-scaled codes, as loops that compilers turn into vector instructions: included once for each instruction set,
// inside a namespace without a name. reference_scaled.py is the oracle.

static inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline uint32_t mix32(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
constexpr float kLargest = 0x1.fffffep127f;  // what a transform back makes of huge values may be more
static inline float canonical(float v) { return v == v ? v : as_float(0x7fc00000u); }

// Bit j: whether value i + j changes its sign; i is a multiple of 32.
static inline uint32_t sign_word(uint32_t i, uint64_t key) { return mix32((i / 32) ^ uint32_t(key)) + uint32_t(key >> 32); }

// Pairs that are 1, 2 or 4 apart, in groups of 8: written so that compilers see a permutation of a vector.
template <int kStep, class T>
static inline void turn_eight(T* x) {
    T other[8], sum[8];
    for (int j = 0; j < 8; j++) other[j] = x[j ^ kStep];
    for (int j = 0; j < 8; j++) sum[j] = other[j] + x[j] * T(j & kStep ? -1 : 1);  // b + a, and a - b
    for (int j = 0; j < 8; j++) x[j] = sum[j];
}

template <class T>
static void transform(T* x, int n) {
    for (int i = 0; i < n; i += 8) {
        turn_eight<1>(x + i);
        turn_eight<2>(x + i);
        turn_eight<4>(x + i);
    }
    for (int step = 8; step < n; step *= 2)
        for (int i = 0; i < n; i += 2 * step)
            for (int k = 0; k < step; k += 8)  // no step is smaller, so that this is a vector
                for (int j = 0; j < 8; j++) {
                    T a = x[i + k + j], b = x[i + k + step + j];
                    x[i + k + j] = T(a + b), x[i + k + step + j] = T(a - b);
                }
}

template <int kWidth>
static inline void halve(uint32_t* most) {
    for (int j = 0; j < kWidth; j++) most[j] = most[j] > most[j + kWidth] ? most[j] : most[j + kWidth];
}

// All loops over values run through groups of kAlign, filled up with zeros, so that compilers know how long they are.
static uint32_t scale_of(const Form& form, const float* x, int padded, bool turned) {
    uint32_t most[kAlign] = {};
    for (int at = 0; at < padded; at += kAlign)
        for (int j = 0; j < kAlign; j++) {
            uint32_t bits = as_bits(x[at + j]) & 0x7fffffffu;
            most[j] = bits > most[j] ? bits : most[j];
        }
    halve<16>(most), halve<8>(most), halve<4>(most);
    const uint32_t magnitude = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
    if (magnitude >= 0x7f800000u) return 0x7fc0;
    if (magnitude == 0 || (turned && magnitude < 0x00800000u)) return 0;
    uint32_t scale = (as_bits(as_float(magnitude) / form.most) + 0xffffu) >> 16;
    if (scale < 0x80) scale = 0x80;
    return scale < form.largest_scale ? scale : form.largest_scale;
}

// t rounded up or down at random; |t| is far below 2^31.
static inline int32_t rounded(float t, uint32_t draw) {
    int32_t below = int32_t(t);
    below -= float(below) > t;
    uint32_t rest = uint32_t(int32_t((t - float(below)) * 16777216.0f));
    return below + int32_t((rest + (draw >> 8)) >> 24);
}

static void encode_block(const Form& form, const float* x, int n, uint32_t i, uint64_t key, uint32_t offset,
                         uint64_t signs, uint8_t* scale_at, uint8_t* codes) {
    const int padded = (n + kAlign - 1) / kAlign * kAlign;
    const bool turns = form.hadamard && n == form.block;
    float room[kMostBlock];
    if (turns) {
        const float factor = 1.0f / float(n);
        for (int at = 0; at < n; at += kAlign) {
            const uint32_t word = sign_word(i + uint32_t(at), signs);
            for (int j = 0; j < kAlign; j++) room[at + j] = as_float(as_bits(x[at + j] * factor) ^ (word >> j & 1) << 31);
        }
        transform(room, n);
        x = room;
    } else if (n != padded) {
        std::memcpy(room, x, size_t(n) * 4);
        std::memset(room + n, 0, size_t(padded - n) * 4);
        x = room;
    }
    const uint32_t scale = scale_of(form, x, padded, turns);
    scale_at[0] = uint8_t(scale), scale_at[1] = uint8_t(scale >> 8);
    if (scale == 0 || scale == 0x7fc0) {
        std::memset(codes, 0, size_t(form.kind == kInt4 ? padded / 2 : padded));
        return;
    }
    const float inverse = 1.0f / as_float(scale << 16);
    const uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32) + offset;
    const int32_t most = int32_t(form.most);
    for (int at = 0; at < padded; at += kAlign) {
        int32_t number[kAlign];
        uint8_t q[kAlign];
        const uint32_t first = i + uint32_t(at);
        if (form.kind == kFp8) {
            for (int j = 0; j < kAlign; j++) {
                const float t = x[at + j] * inverse;
                const int32_t field = std::max(int32_t(as_bits(t) >> 23 & 255), 121);
                const float grid = as_float(uint32_t(257 - field) << 23);
                const int32_t signed_number = rounded(t * grid, mix32((first + uint32_t(j)) ^ k0) + k1);
                const int32_t minus = signed_number >> 31;
                number[j] = std::min(((signed_number ^ minus) - minus) + 8 * (field - 121), 126) | (minus & 128);
            }
        } else {
            for (int j = 0; j < kAlign; j++) {
                const int32_t found = rounded(x[at + j] * inverse, mix32((first + uint32_t(j)) ^ k0) + k1);
                number[j] = std::max(std::min(found, most), -most);
            }
        }
        for (int j = 0; j < kAlign; j++) q[j] = uint8_t(number[j]);
        if (form.kind != kInt4) {
            std::memcpy(codes + at, q, kAlign);
            continue;
        }
        uint16_t pairs[kAlign / 2];  // two codes are one number: better for compilers than every other one
        std::memcpy(pairs, q, kAlign);
        uint8_t packed[kAlign / 2];
        for (int j = 0; j < kAlign / 2; j++) packed[j] = uint8_t((pairs[j] & 15) | (pairs[j] >> 4 & 0xf0));
        std::memcpy(codes + at / 2, packed, kAlign / 2);
    }
}

static void decode_block(const Form& form, const uint8_t* scale_at, const uint8_t* codes, int n, uint32_t i,
                         uint64_t signs, bool add, float* x) {
    const float scale = as_float(uint32_t(scale_at[0] | scale_at[1] << 8) << 16);
    const int padded = (n + kAlign - 1) / kAlign * kAlign;
    const bool turns = form.hadamard && n == form.block;
    float values[kMostBlock];
    int32_t sums[kMostBlock];
    for (int at = 0; at < padded; at += kAlign) {
        uint8_t q[kAlign];
        if (form.kind == kInt4) {
            uint8_t packed[kAlign / 2];
            uint16_t pairs[kAlign / 2];
            std::memcpy(packed, codes + at / 2, kAlign / 2);
            for (int j = 0; j < kAlign / 2; j++) pairs[j] = uint16_t((packed[j] & 15) | (packed[j] & 0xf0) << 4);
            std::memcpy(q, pairs, kAlign);
            for (int j = 0; j < kAlign; j++) q[j] = uint8_t((q[j] ^ 8) - 8);
        } else
            std::memcpy(q, codes + at, kAlign);
        if (form.kind == kFp8) {
            for (int j = 0; j < kAlign; j++) {
                const int32_t code = q[j], low = code & 127, field = low >> 3, tiny = field == 0;
                const float number = float((low & 7) + 8 - 8 * tiny) * as_float(uint32_t(field + tiny + 117) << 23);
                const uint32_t nan = low == 127 ? 0x7fc00000u : 0;
                values[at + j] = as_float(as_bits(number) | nan | uint32_t(code & 128) << 24) * scale;
            }
        } else if (turns)
            for (int j = 0; j < kAlign; j++) sums[at + j] = int8_t(q[j]);
        else
            for (int j = 0; j < kAlign; j++) values[at + j] = float(int8_t(q[j])) * scale;
    }
    if (turns) {
        transform(sums, n);
        for (int at = 0; at < n; at += kAlign) {
            const uint32_t word = sign_word(i + uint32_t(at), signs);
            for (int j = 0; j < kAlign; j++) {
                const int32_t flip = -int32_t(word >> j & 1);
                float value = float((sums[at + j] ^ flip) - flip) * scale;
                value = value > kLargest ? kLargest : value;
                values[at + j] = value < -kLargest ? -kLargest : value;
            }
        }
    }
    if (add)
        for (int j = 0; j < n; j++) x[j] = canonical(x[j] + values[j]);
    else
        for (int j = 0; j < n; j++) x[j] = canonical(values[j]);
}

static void add_values(const float* y, int n, float* x) {
    for (int j = 0; j < n; j++) x[j] = canonical(x[j] + y[j]);
}
static void divide_values(float divisor, int n, float* x) {
    for (int j = 0; j < n; j++) x[j] = x[j] / divisor;
}

static const Kernels kernels_here{decode_block, encode_block, add_values, divide_values};
