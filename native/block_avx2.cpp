// The block coder compiled for AVX2: the loops of values.h vectorise by themselves, the lanes encode by hand.
#include "lanes_avx2.h"

namespace gz {
namespace {
namespace avx2 {

#include "stages.h"
#include "sample.h"
#include "sparse.h"
#include "block.h"

}  // namespace avx2
}  // namespace

const Kernels* avx2_kernels() {
    static const Kernels kernels{"avx2", avx2::encode_block, avx2::decode_group, avx2::sample_block,
                                 avx2::floors, avx2::round_block, avx2::lost_of_block};
    return &kernels;
}

}  // namespace gz
