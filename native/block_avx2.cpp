// The block coder for AVX2.
#include "lanes.h"
#include "vector_avx2.h"

namespace gz {
namespace {
namespace avx2 {

#include "block_vector.h"

}  // namespace avx2
}  // namespace

const Kernels* avx2_kernels() {
    static const Kernels kernels{"avx2", avx2::encode_block, avx2::decode_group, avx2::sample_block,
                                 avx2::fast_floors, avx2::round_block, avx2::lost_of_block, avx2::divide};
    return &kernels;
}

}  // namespace gz
