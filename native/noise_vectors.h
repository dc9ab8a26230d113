// What the vector versions of the codec noise share: templates become functions. Included by every instruction set inside
// its own namespace, behind round_by, pack_by, unpack_by, deliver_by and Delivering.

void round(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    if (!in_fixed_point(how)) round_plain(x, 0, n, how, at, work);
    else if (how.shape) round_by<true>(x, n, how, at, work);
    else round_by<false>(x, n, how, at, work);
}

int pack(const int8_t* q, int rows, int low, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes) {
    switch (low) {
        case 0: return pack_by<0>(q, rows, reach, pairs, planes, escapes);
        case 1: return pack_by<1>(q, rows, reach, pairs, planes, escapes);
        case 2: return pack_by<2>(q, rows, reach, pairs, planes, escapes);
        default: return pack_by<3>(q, rows, reach, pairs, planes, escapes);
    }
}

int unpack(const uint16_t* entries, int rows, int low, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    switch (low) {
        case 0: return unpack_by<0>(entries, rows, reach, planes, q, escaped);
        case 1: return unpack_by<1>(entries, rows, reach, planes, q, escaped);
        case 2: return unpack_by<2>(entries, rows, reach, planes, q, escaped);
        default: return unpack_by<3>(entries, rows, reach, planes, q, escaped);
    }
}

template <bool kShaped, Delivery kTo, bool kSquares>
void deliver_by(const int8_t* q, int n, const Target& target) {
    Delivering<kShaped, kTo, kSquares> delivering(target);
    int i = 0;
    for (; i + 32 <= n; i += 32) delivering.template some<32>(q + i, i);
    delivering.end();
    deliver_plain(q, i, n, target);
}

template <bool kShaped>
void deliver_shaped(const int8_t* q, int n, const Target& target) {
    if (target.delivery == kAdd) deliver_by<kShaped, kAdd, false>(q, n, target);
    else if (target.delivery == kPut && target.squares) deliver_by<kShaped, kPut, true>(q, n, target);
    else if (target.delivery == kPut) deliver_by<kShaped, kPut, false>(q, n, target);
    else if (target.squares) deliver_by<kShaped, kDivide, true>(q, n, target);
    else deliver_by<kShaped, kDivide, false>(q, n, target);
}

void deliver(const int8_t* q, int n, const Target& target) {
    if (!in_one_product(target)) deliver_plain(q, 0, n, target);
    else if (target.shape) deliver_shaped<true>(q, n, target);
    else deliver_shaped<false>(q, n, target);
}

template <bool kShaped, bool kSquares>
void decode_lanes_beside(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits, Behind& behind) {
    Delivering<kShaped, kPut, kSquares> delivering(behind.target);
    const int8_t* q = behind.q;
    int at = 0;
    decode_lanes_by<8>(lane, rows, table, entries, bits, [&] {
        delivering.template some<64>(q + at, at);
        at += 64;
    });
    delivering.end();
    behind.done = at;
}

void decode_lanes(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits, Behind& behind) {
    if (!behind.q || !in_one_product(behind.target)) decode_lanes_by<8>(lane, rows, table, entries, bits, [] {});
    else if (behind.target.shape && behind.target.squares) decode_lanes_beside<true, true>(lane, rows, table, entries, bits, behind);
    else if (behind.target.shape) decode_lanes_beside<true, false>(lane, rows, table, entries, bits, behind);
    else if (behind.target.squares) decode_lanes_beside<false, true>(lane, rows, table, entries, bits, behind);
    else decode_lanes_beside<false, false>(lane, rows, table, entries, bits, behind);
}
