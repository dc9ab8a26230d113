// Frames of several tensors in one call: what an exchange sends and adds up.
#include "body.h"

namespace gz {
namespace {

constexpr uint64_t kHeader = 24, kEntry = 8;  // of a frame without a checksum, and of the table of sizes
constexpr int kVersion = 1;

void store64(uint8_t* p, uint64_t v) {
    store32(p, uint32_t(v));
    store32(p + 4, uint32_t(v >> 32));
}
uint64_t load64(const uint8_t* p) { return load32(p) | uint64_t(load32(p + 4)) << 32; }

uint64_t padded(uint64_t size) { return (size + kEntry - 1) / kEntry * kEntry; }

const gz_floor* floor_of(const gz_piece& piece) {
    return piece.floor.given || piece.floor.theta ? &piece.floor : nullptr;
}

gz_job job_of(const gz_job& job, const gz_piece& piece) {
    gz_job used = job;
    if (piece.exact) used.mode = GZ_LOSSLESS;
    return used;
}

void write_header(uint8_t* out, int codec, int dtype, uint64_t n, uint64_t body) {
    const uint8_t head[8] = {'G', 'Z', kVersion, uint8_t(codec), uint8_t(dtype), 0, 0, 0};
    std::memcpy(out, head, sizeof head);
    store64(out + 8, n);
    store64(out + 16, body);
}

bool fits_header(const uint8_t* frame, uint64_t size, int codec, int dtype, uint64_t n) {
    if (size < kHeader) return false;
    uint8_t expected[kHeader];
    write_header(expected, codec, dtype, n, size - kHeader);
    return std::memcmp(frame, expected, kHeader) == 0;
}

// One piece's share of a part: a body, or values.
struct Term {
    Body body;
    const void* values;
};

// Finds the bodies of all pieces in a part, and reads their heads.
int read_part(const gz_job& job, const gz_part& part, const gz_piece* pieces, uint64_t count, int codec, std::vector<Term>& terms) {
    terms.reserve(count);
    if (part.values) {
        for (uint64_t i = 0; i < count; i++) terms.push_back({{}, part.values[i]});
        return 0;
    }
    if (part.size / kEntry < count) return GZ_BAD_FRAMES;
    uint64_t at = kEntry * count;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t size = load64(part.data + kEntry * i), left = part.size - at;
        if (size > left || padded(size) > left) return GZ_BAD_FRAMES;
        const uint8_t* frame = part.data + at;
        if (!fits_header(frame, size, codec, job.dtype, pieces[i].n)) return GZ_BAD_FRAMES;
        Body body{frame + kHeader, size - kHeader, pieces[i].n, kFixed, false, {}, {}};
        if (body.size >= kBodyHead && load32(body.data + 4) != job.book) return GZ_NO_BOOK;
        if (int error = body.read(pieces[i].lengths)) return error;
        if (job.dtype != GZ_FLOAT32 && body.coding != kFixed) return GZ_BAD_HEAD;
        if (body.coding == kNear && body.n && !floor_of(pieces[i])) return GZ_BAD_ARGUMENT;
        terms.push_back({std::move(body), nullptr});
        at += padded(size);
    }
    return at == part.size ? 0 : GZ_BAD_FRAMES;
}

struct Failure {
    int error;
    uint64_t part;
};

// Blocks [first, last) of a piece: all its terms, one group of blocks after the other.
Failure sum_blocks(const gz_job& job, const gz_piece& piece, const Term* const* terms, uint64_t term_count, uint64_t first,
                   uint64_t last, bool add, float divisor, const Kernels* use) {
    const uint64_t item = uint64_t(float_layout(job.dtype).item_bytes);
    const gz_job used = job_of(job, piece);
    uint8_t* out = static_cast<uint8_t*>(piece.values);
    const bool divides = divisor != 1;
    const bool stream = !add && term_count == 1 && piece.n * item >= kStreamBytes;
    // What does not bypass the cache is divided while it is in there.
    const uint64_t step = term_count > 1 ? kGroup : divides && !stream ? kSegmentBlocks : last - first;
    for (uint64_t at = first; at < last; at += step) {
        const uint64_t end = std::min(last, at + step);
        for (uint64_t t = 0; t < term_count; t++) {
            const bool adds = add || t > 0;
            if (const void* values = terms[t]->values) {
                const Source source{used, values, piece.n, floor_of(piece), use};
                for (uint64_t number = at; number < end; number++)
                    use->round(source.block(number, nullptr), {out + number * kBlock * item, adds, false}, scratch()[0]);
            } else if (int error = decode_blocks(terms[t]->body, piece.lengths, at, end, job.dtype, floor_of(piece), job.shift, adds, stream,
                                                 out, use)) {
                return {error, t};
            }
        }
        if (divides) use->divide(out + at * kBlock * item, std::min(piece.n, end * kBlock) - at * kBlock, divisor);
    }
    return {};
}

}  // namespace
}  // namespace gz

using namespace gz;

extern "C" {

int64_t gz_encode_frames(const gz_job* job, const gz_piece* pieces, uint64_t count, int32_t codec, float scale, uint8_t* out,
                         uint64_t capacity, int32_t threads) {
    uint64_t at = kEntry * count;
    for (uint64_t i = 0; i < count; i++) {
        const gz_piece& piece = pieces[i];
        if (piece.lost && job->dtype != GZ_FLOAT32) return GZ_BAD_ARGUMENT;
        if (at > capacity || capacity - at < kHeader + padded(gz_bound(piece.n, job->dtype))) return GZ_NO_ROOM;
        uint8_t* frame = out + at;
        const int64_t body = encode_body(job_of(*job, piece), piece.values, piece.n, floor_of(piece), piece.lengths, frame + kHeader,
                                         capacity - at - kHeader, threads, {static_cast<uint8_t*>(piece.lost), scale});
        if (body < 0) return body;
        write_header(frame, codec, job->dtype, piece.n, uint64_t(body));
        const uint64_t size = kHeader + uint64_t(body);
        std::memset(frame + size, 0, size_t(padded(size) - size));
        store64(out + kEntry * i, size);
        at += padded(size);
    }
    return int64_t(at);
}

int64_t gz_lost(const gz_job* job, const gz_piece* pieces, uint64_t count, float scale) {
    for (uint64_t i = 0; i < count; i++) {
        const gz_piece& piece = pieces[i];
        const gz_job used = job_of(*job, piece);
        if (!valid(used, piece.n, floor_of(piece)) || job->dtype != GZ_FLOAT32 || !piece.lost) return GZ_BAD_ARGUMENT;
        const Source source{used, piece.values, piece.n, floor_of(piece), kernels()};
        for (uint64_t number = 0; number < blocks_of(piece.n); number++)
            source.kernels->lost(source.block(number, nullptr), scale, static_cast<uint8_t*>(piece.lost) + number * kBlock * 4, scratch()[0]);
    }
    return 0;
}

int64_t gz_sum_frames(const gz_job* job, const gz_part* parts_of_sum, uint64_t part_count, const gz_piece* pieces,
                      uint64_t count, int32_t codec, int32_t add, uint32_t divisor, int32_t threads,
                      uint64_t* failed) {
    *failed = 0;
    if (!valid(*job, 0, nullptr) || !divisor || (divisor > 1 && job->dtype != GZ_FLOAT32)) return GZ_BAD_ARGUMENT;
    std::vector<std::vector<Term>> terms(part_count);
    for (uint64_t p = 0; p < part_count; p++) {
        *failed = p;
        if (parts_of_sum[p].values)
            for (uint64_t i = 0; i < count; i++)
                if (!valid(job_of(*job, pieces[i]), pieces[i].n, floor_of(pieces[i]))) return GZ_BAD_ARGUMENT;
        if (int error = read_part(*job, parts_of_sum[p], pieces, count, codec, terms[p])) return error;
    }
    const Kernels* use = kernels();
    std::vector<const Term*> own(part_count);
    for (uint64_t i = 0; i < count; i++) {
        for (uint64_t p = 0; p < part_count; p++) own[p] = &terms[p][i];
        if (stay_together(pieces[i].n, threads)) {
            const Failure f = sum_blocks(*job, pieces[i], own.data(), part_count, 0, blocks_of(pieces[i].n), add != 0, float(divisor), use);
            *failed = f.part;
            if (f.error) return f.error;
            continue;
        }
        const std::vector<uint64_t> bounds = parts(pieces[i].n, threads);
        std::vector<Failure> failure(bounds.size() - 1);
        run_parts(failure.size(), [&](size_t k) {
            failure[k] = sum_blocks(*job, pieces[i], own.data(), part_count, bounds[k], bounds[k + 1], add != 0, float(divisor), use);
        });
        for (const Failure& f : failure)
            if (f.error) {
                *failed = f.part;
                return f.error;
            }
    }
    return 0;
}

}  // extern "C"
