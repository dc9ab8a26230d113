// What the sampled rows of a block say: its base, and the symbols that code lengths are made of
// (docs/format.md, "Symbols" and "Choosing code lengths"). Included like values.h.

template <typename Word, int MantissaBits, uint32_t Mask>
void exponents(const uint8_t* values, int n, uint8_t* GZ_RESTRICT exponent) {
    for (int i = 0; i < n; i++) exponent[i] = uint8_t(value_at<Word>(values, i) >> MantissaBits & Mask);
}

// The exponents of rows 0, 16, 32, ..., one after the other; returns their number.
inline int sampled_exponents(const BlockIn& in, uint8_t* exponent, Scratch& scratch) {
    if (in.coding == kNear)
        if (int count = sample_near(in, exponent)) return count;
    const size_t item = size_t(float_layout(in.job.dtype).item_bytes);
    uint8_t* picked = reinterpret_cast<uint8_t*>(scratch.part);
    int8_t* floor = scratch.floor;
    int count = 0;
    for (int start = 0; start < in.n; start += kSampleRows * kLanes) {
        int here = in.n - start < kLanes ? in.n - start : kLanes;
        const uint8_t* row = static_cast<const uint8_t*>(in.values) + size_t(start) * item;
        std::memcpy(picked + size_t(count) * item, row, size_t(here) * item);
        if (in.coding != kFixed) make_floors(in.floors, start, here, floor + count);
        count += here;
    }
    if (in.job.dtype == GZ_BFLOAT16) {
        exponents<uint16_t, 7, 255>(picked, count, exponent);
    } else if (in.job.dtype == GZ_FLOAT16) {
        exponents<uint16_t, 10, 31>(picked, count, exponent);
    } else if (in.job.mode == GZ_LOSSLESS) {
        exponents<uint32_t, 23, 255>(picked, count, exponent);
    } else {
        map_values(picked, count, in.job, floor, scratch.mapped);
        exponents<uint32_t, 23, 255>(reinterpret_cast<const uint8_t*>(scratch.mapped), count, exponent);
    }
    return count;
}

Sample sample_block(const BlockIn& in, uint32_t (*counts)[256], Scratch& scratch) {
    uint8_t exponent[kSampled + 64], symbol[kSampled];
    const int n = sampled_exponents(in, exponent, scratch);
    uint32_t sum = 0, nonzero = 0;
    uint8_t lowest = 255, highest = 0;
    for (int i = 0; i < n; i++) {
        sum += exponent[i];
        nonzero += exponent[i] != 0;
        lowest = exponent[i] < lowest ? exponent[i] : lowest;
        highest = exponent[i] > highest ? exponent[i] : highest;
    }
    const Sample sample{rounded_mean(sum, nonzero), int(nonzero), lowest == highest};
    if (!counts || !nonzero) return sample;
    for (int i = 0; i < n; i++) symbol[i] = symbol_of(exponent[i], sample.base);
    // Four histograms, so that equal neighbours do not wait for each other.
    const int histograms = n <= kFewSampled ? 0 : 3;
    for (int i = 0; i < n; i++) counts[i & histograms][symbol[i]]++;
    return sample;
}
