// The codec noise for any processor.
#include "noise.h"

namespace gz {
namespace noise {
namespace {
namespace scalar {

#include "noise_plain.h"

void round(const uint8_t* x, int n, const Rounding& how, int at, Work& work) { round_plain(x, 0, n, how, at, work); }
void decode_lanes(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits, Behind&) {
    decode_lanes_by<8>(lane, rows, table, entries, bits, [] {});
}
void deliver(const int8_t* q, int n, const Target& target) { deliver_plain(q, 0, n, target); }

}  // namespace scalar
}  // namespace

const Kernels* scalar_kernels() {
    static const Kernels kernels{"scalar", scalar::squares_plain, scalar::weights_plain, scalar::largest_plain, scalar::shape_plain, scalar::round, scalar::scan_plain, scalar::pack_plain,
                                 scalar::encode_lanes_plain, scalar::decode_lanes, scalar::unpack_plain, scalar::deliver, scalar::accumulate_plain};
    return &kernels;
}

}  // namespace noise
}  // namespace gz
