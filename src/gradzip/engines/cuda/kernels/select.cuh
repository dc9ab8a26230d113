// Which values are large, for sparse codecs: the ascending places (int64, in `body`) of those whose magnitude, read as an
// integer, is at least the one number in `lengths`. One look at the input: a group of threads counts in its stretch of `a.keep` values, learns
// how many there are before it as the encoders do, and writes. What is beyond `body_bytes` / 8 places is only counted.

DEVICE u32 magnitude_of(const u32* x, u64 i) { return x[i] & 0x7fffffffu; }
DEVICE u32 magnitude_of(const u16* x, u64 i) { return x[i] & 0x7fffu; }

template <class F>
DEVICE void select_large(const Args& a) {
    __shared__ u32 counts[8], ticket;
    __shared__ u64 place;
    const Tensor& t = a.tensor[0];
    const typename F::Bits* x = pointer<const typename F::Bits>(t.values);
    u32 number = take_ticket(a, &ticket), warp = warp_id(), own = (u32)a.keep / 8;
    u32 least = magnitude_of(pointer<const typename F::Bits>(t.lengths), 0);
    u64 start = (u64)number * (u32)a.keep + (u64)warp * own;
    u64 end = start + own < t.numel ? start + own : t.numel;
    u32 found = 0;
    for (u64 i = start + lane_id(); i < end; i += 32) found += magnitude_of(x, i) >= least;
    __syncwarp();
    found = sum(found);
    if (lane_id() == 0) counts[warp] = found;
    __syncthreads();
    u32 all = 0, before = 0;
    for (u32 w = 0; w < 8; w++) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    Turn turn = {&t, 0, number, number, 0, 0, nullptr};
    if (warp == 0) {
        announce(a, turn, all);
        u64 others = await_place(a, turn, all);
        if (lane_id() == 0) {
            place = others;
            if (number == gridDim.x - 1) tell_size(a, 0, others + all);
        }
    }
    __syncthreads();
    u64 at = place + before, most = t.body_bytes / 8;
    long long* places = pointer<long long>(t.body);
    for (u64 row = start; row < end; row += 32) {
        u64 i = row + lane_id();
        bool large = i < end && magnitude_of(x, i) >= least;
        u32 votes = __ballot_sync(kAll, large);
        u64 to = at + (u32)__popc(votes & lower_lanes());
        if (large && to < most) places[to] = (long long)i;
        at += (u32)__popc(votes);
    }
}
