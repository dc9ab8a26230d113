// The block coder for AVX2.
#include "lanes.h"
#include "vector_avx2.h"

namespace gz {
namespace {
namespace avx2 {

// Large outputs bypass the cache: they will not be read soon, and a plain store would first read what it overwrites.
inline void copy_out(void* out, const void* values, size_t bytes, bool stream) {
    uint8_t* to = static_cast<uint8_t*>(out);
    const uint8_t* from = static_cast<const uint8_t*>(values);
    size_t i = 0;
    if (stream && !(reinterpret_cast<uintptr_t>(to) % kStreamAlignment))
        for (; i + kStreamAlignment <= bytes; i += kStreamAlignment) stream_bytes(to + i, load(from + i));
    std::memcpy(to + i, from + i, bytes - i);
}

using plain::find_nonzero;

#include "values.h"
#include "lanes_vector.h"
#include "values_vector.h"
#include "near_vector.h"
#include "sample.h"
#include "sparse.h"
#include "block.h"

}  // namespace avx2
}  // namespace

const Kernels* avx2_kernels() {
    static const Kernels kernels{"avx2", avx2::encode_block, avx2::decode_group, avx2::sample_block,
                                 avx2::fast_floors, avx2::round_block, avx2::lost_of_block};
    return &kernels;
}

}  // namespace gz
