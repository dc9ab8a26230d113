// Block-scaled codes of whole frames, and their entry point of gradzip.h.
#include "scaled.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "body.h"
#include "float_mode.h"

namespace gz {
namespace scaled {
namespace {

const Kernels* kernels() {
#if !defined(GRADZIP_NO_SIMD) && !defined(__aarch64__)  // there the compiler vectorises the plain ones
    const char* name = gz::kernels()->name;
    if (std::strcmp(name, "avx512") == 0) return avx512_kernels();
    if (std::strcmp(name, "avx2") == 0) return avx2_kernels();
#endif
    return scalar_kernels();
}

Form form_of(int kind, int block, bool hadamard) {
    const float most = kind == kInt8 ? 127.0f : kind == kInt4 ? 7.0f : 448.0f;
    const float largest = std::numeric_limits<float>::max() / most;
    uint32_t bits;
    std::memcpy(&bits, &largest, 4);
    return {kind, block, hadamard, most, bits >> 16};
}

bool valid(const Form& form, const gz_scaled_part* parts, uint64_t count, uint64_t size) {
    if (form.kind < kInt8 || form.kind > kFp8 || form.block < 32 || form.block > kMostBlock || form.block & (form.block - 1))
        return false;
    if (form.hadamard && form.kind == kFp8) return false;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t padded = (parts[i].n + kAlign - 1) / kAlign * kAlign, blocks = (parts[i].n + form.block - 1) / form.block;
        const uint64_t bytes = form.kind == kInt4 ? padded / 2 : padded;
        if (2 * (parts[i].scale_at + blocks) > size || parts[i].code_at + bytes > size) return false;
        if (parts[i].start % 32) return false;  // words of signs belong to 32 values
    }
    return true;
}

// The blocks from `first` to `last`, counted through all parts.
void code(const Form& form, const gz_scaled_part* parts, uint64_t count, const uint8_t* const* terms, uint64_t term_count,
          float divisor, uint8_t* out, uint64_t first, uint64_t last, const Kernels* use) {
    const int per_byte = form.kind == kInt4 ? 2 : 1;
    uint64_t passed = 0;
    for (uint64_t p = 0; p < count && passed < last; p++) {
        const gz_scaled_part& part = parts[p];
        const uint64_t blocks = (part.n + form.block - 1) / form.block;
        const uint64_t from = first > passed ? first - passed : 0, to = std::min(blocks, last - passed);
        for (uint64_t b = from; b < to; b++) {
            const uint64_t at = b * uint64_t(form.block);
            const int n = int(std::min<uint64_t>(uint64_t(form.block), part.n - at));
            const uint32_t i = uint32_t(part.start + at);
            const uint64_t scale = 2 * (part.scale_at + b), codes = part.code_at + at / uint64_t(per_byte);
            float sum[kMostBlock];
            const float* x = term_count ? sum : part.values + at;
            for (uint64_t t = 0; t < term_count; t++) {
                if (terms[t]) use->decode(form, terms[t] + scale, terms[t] + codes, n, i, part.signs, t > 0, sum);
                else if (t) use->add(part.values + at, n, sum);
                else
                    for (int j = 0; j < n; j++) {
                        const float v = part.values[at + uint64_t(j)];
                        sum[j] = v == v ? v : std::numeric_limits<float>::quiet_NaN();
                    }
            }
            if (term_count && divisor > 1) use->divide(divisor, n, sum);
            if (out) use->encode(form, x, n, i, part.key, part.offset, part.signs, out + scale, out + codes);
            else std::memcpy(part.out + at, x, size_t(n) * 4);
        }
        passed += blocks;
    }
}

}  // namespace
}  // namespace scaled
}  // namespace gz

using namespace gz;

extern "C" {

int64_t gz_scaled_code(int32_t kind, int32_t block, int32_t hadamard, const gz_scaled_part* parts, uint64_t count,
                       const uint8_t* const* terms, uint64_t term_count, uint32_t divisor, uint8_t* out, uint64_t size,
                       int32_t threads) {
    const scaled::Form form = scaled::form_of(kind, block, hadamard != 0);
    if (!divisor || !scaled::valid(form, parts, count, size) || (!out && !term_count)) return GZ_BAD_ARGUMENT;
    uint64_t blocks = 0, gap = 0;
    for (uint64_t i = 0; i < count; i++) {
        gap = 2 * (parts[i].scale_at + (parts[i].n + uint64_t(block) - 1) / uint64_t(block));
        blocks += (parts[i].n + uint64_t(block) - 1) / uint64_t(block);
    }
    if (out && count) std::memset(out + gap, 0, size_t(parts[0].code_at - gap));  // between scales and codes
    const uint64_t few = 1 << 12;  // blocks for which a thread is worth its start
    const uint64_t shares = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(std::max(threads, 1)), blocks / few));
    const scaled::Kernels* use = scaled::kernels();
    run_parts(size_t(shares), [&](size_t k) {
        FloatMode mode;
        scaled::code(form, parts, count, terms, term_count, float(divisor), out, blocks * k / shares, blocks * (k + 1) / shares, use);
    });
    return 0;
}

}  // extern "C"
