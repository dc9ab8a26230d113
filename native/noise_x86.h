// Sums of the codec noise for AVX2, which AVX-512 does not do faster: it halves its registers for float64. Included by both
// inside their own namespaces.

double squares(const uint8_t* x, int n) {
    if (n % 32) return squares_plain(x, n);
    __m256d lane[8];
    for (__m256d& l : lane) l = _mm256_setzero_pd();
    for (int i = 0; i < n; i += 32)
        for (int j = 0; j < 8; j++) {
            const __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(x) + i + 4 * j));
            lane[j] = _mm256_fmadd_pd(v, v, lane[j]);  // a square of a float32 is exact, so that this is no other sum
        }
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = _mm256_add_pd(lane[j], lane[j + half]);
    double last[4];
    _mm256_storeu_pd(last, lane[0]);
    return (last[0] + last[2]) + (last[1] + last[3]);
}

uint64_t weights(const int8_t* shape, uint64_t n) {
    // Byte b of 4^j for j = 0 to 12, which is what a shape plus 12 looks up.
    const __m256i table[4] = {_mm256_broadcastsi128_si256(_mm_setr_epi8(1, 4, 16, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
                              _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 1, 4, 16, 64, 0, 0, 0, 0, 0, 0, 0, 0)),
                              _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 16, 64, 0, 0, 0, 0)),
                              _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0))};
    const __m256i zero = _mm256_setzero_si256(), deepest = _mm256_set1_epi8(-12);
    __m256i sum[4] = {zero, zero, zero, zero};
    uint64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(shape + i));
        const __m256i j = _mm256_sub_epi8(_mm256_min_epi8(_mm256_max_epi8(all, deepest), zero), deepest);
        for (int b = 0; b < 4; b++) sum[b] = _mm256_add_epi64(sum[b], _mm256_sad_epu8(_mm256_shuffle_epi8(table[b], j), zero));
    }
    uint64_t total = weights_plain(shape + i, n - i);
    for (int b = 0; b < 4; b++) {
        uint64_t part[4];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(part), sum[b]);
        total += (part[0] + part[1] + part[2] + part[3]) << (8 * b);
    }
    return total;
}
