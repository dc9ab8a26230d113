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

// Bit j of word w: whether value 32 w + j of the block changes its sign.
static void sign_words(uint32_t i, int n, uint64_t key, uint32_t* words) {
    for (int w = 0; w < n / 32; w++) words[w] = mix32((i / 32 + uint32_t(w)) ^ uint32_t(key)) + uint32_t(key >> 32);
}

template <class T>
static void transform(T* x, int n) {
    for (int step = 1; step < 8; step *= 2)
        for (int i = 0; i < n; i += 2 * step)
            for (int j = i; j < i + step; j++) {
                T a = x[j], b = x[j + step];
                x[j] = T(a + b), x[j + step] = T(a - b);
            }
    for (int step = 8; step < n; step *= 2)
        for (int i = 0; i < n; i += 2 * step)
            for (int k = 0; k < step; k += 8)  // no step is smaller, so that this is a vector
                for (int j = 0; j < 8; j++) {
                    T a = x[i + k + j], b = x[i + k + step + j];
                    x[i + k + j] = T(a + b), x[i + k + step + j] = T(a - b);
                }
}

static uint32_t scale_of(const Form& form, const float* x, int n, bool turned) {
    uint32_t magnitude = 0;
    for (int j = 0; j < n; j++) {
        uint32_t bits = as_bits(x[j]) & 0x7fffffffu;
        magnitude = bits > magnitude ? bits : magnitude;
    }
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
    float turned[kMostBlock];
    const bool turns = form.hadamard && n == form.block;
    if (turns) {
        uint32_t words[kMostBlock / 32];
        sign_words(i, n, signs, words);
        float factor = 1.0f / float(n);
        for (int w = 0; w < n / 32; w++)
            for (int j = 0; j < 32; j++)
                turned[32 * w + j] = as_float(as_bits(x[32 * w + j] * factor) ^ (words[w] >> j & 1) << 31);
        transform(turned, n);
        x = turned;
    }
    uint32_t scale = scale_of(form, x, n, turns);
    scale_at[0] = uint8_t(scale), scale_at[1] = uint8_t(scale >> 8);
    int padded = (n + kAlign - 1) / kAlign * kAlign;
    if (scale == 0 || scale == 0x7fc0) {
        std::memset(codes, 0, size_t(form.kind == kInt4 ? padded / 2 : padded));
        return;
    }
    float inverse = 1.0f / as_float(scale << 16);
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32) + offset;
    int8_t q[kMostBlock];
    if (form.kind == kFp8) {
        for (int j = 0; j < n; j++) {
            float t = x[j] * inverse;
            int32_t field = int32_t(as_bits(t) >> 23 & 255);
            field = field > 121 ? field : 121;
            int32_t number = rounded(t * as_float(uint32_t(257 - field) << 23), mix32((i + uint32_t(j)) ^ k0) + k1);
            int32_t magnitude = (number < 0 ? -number : number) + 8 * (field - 121);
            magnitude = magnitude < 126 ? magnitude : 126;
            q[j] = int8_t(magnitude | (number < 0 ? 128 : 0));
        }
    } else {
        int32_t most = int32_t(form.most);
        for (int j = 0; j < n; j++) {
            int32_t number = rounded(x[j] * inverse, mix32((i + uint32_t(j)) ^ k0) + k1);
            number = number < most ? number : most;
            q[j] = int8_t(number > -most ? number : -most);
        }
    }
    for (int j = n; j < padded; j++) q[j] = 0;
    if (form.kind == kInt4)
        for (int j = 0; j < padded / 2; j++) codes[j] = uint8_t((q[2 * j] & 15) | q[2 * j + 1] << 4);
    else
        std::memcpy(codes, q, size_t(padded));
}

static void decode_block(const Form& form, const uint8_t* scale_at, const uint8_t* codes, int n, uint32_t i,
                         uint64_t signs, bool add, float* x) {
    float scale = as_float(uint32_t(scale_at[0] | scale_at[1] << 8) << 16);
    float values[kMostBlock];
    if (form.kind == kFp8) {
        for (int j = 0; j < n; j++) {
            int32_t low = codes[j] & 127, field = low >> 3 ? low >> 3 : 1;
            float number = float(low >> 3 ? (low & 7) | 8 : low) * as_float(uint32_t(field + 117) << 23);
            number = low == 127 ? as_float(0x7fc00000u) : number;
            values[j] = as_float(as_bits(number) ^ uint32_t(codes[j] & 128) << 24) * scale;
        }
    } else {
        int16_t q[kMostBlock];
        if (form.kind == kInt4)
            for (int j = 0; j < (n + 1) / 2; j++) {
                q[2 * j] = int16_t(int8_t(uint8_t(codes[j] << 4)) >> 4);
                q[2 * j + 1] = int16_t(int8_t(codes[j]) >> 4);
            }
        else
            for (int j = 0; j < n; j++) q[j] = int8_t(codes[j]);
        if (form.hadamard && n == form.block) {
            int32_t sums[kMostBlock];
            for (int j = 0; j < n; j++) sums[j] = q[j];
            transform(sums, n);
            uint32_t words[kMostBlock / 32];
            sign_words(i, n, signs, words);
            for (int w = 0; w < n / 32; w++)
                for (int j = 0; j < 32; j++) {
                    int32_t flip = -int32_t(words[w] >> j & 1);
                    float value = float((sums[32 * w + j] ^ flip) - flip) * scale;
                    value = value > kLargest ? kLargest : value;
                    values[32 * w + j] = value < -kLargest ? -kLargest : value;
                }
        } else
            for (int j = 0; j < n; j++) values[j] = float(q[j]) * scale;
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
