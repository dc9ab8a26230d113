// Code lengths by package-merge and canonical tables (docs/format.md, "Code tables" and "Choosing code lengths").
#include <algorithm>
#include <utility>

#include "layout.h"

namespace gz {

namespace {
constexpr int64_t kMinShare = 1024;  // a symbol rarer than 1/1024 is left to the escape
constexpr int kMaxItems = 257;
constexpr int kMaxLimit = 8;

struct Item {
    int64_t weight;
    int symbol;
};

// lengths[i] of sorted items, at most limit. Only weights matter: in every level the chosen leaves are a prefix.
void package_merge(const Item* items, int count, int limit, int* lengths) {
    std::fill(lengths, lengths + count, 0);
    if (count < 2) return;
    static thread_local int64_t level[kMaxLimit][2 * kMaxItems];
    static thread_local bool is_leaf[kMaxLimit][2 * kMaxItems];
    int size[kMaxLimit];
    for (int l = 0; l < limit; l++) {
        int packages = l ? size[l - 1] / 2 : 0, leaf = 0, package = 0, at = 0;
        while (leaf < count || package < packages) {
            int64_t bundle = package < packages ? level[l - 1][2 * package] + level[l - 1][2 * package + 1] : 0;
            bool take_leaf = leaf < count && (package >= packages || items[leaf].weight <= bundle);
            level[l][at] = take_leaf ? items[leaf++].weight : bundle;
            package += !take_leaf;
            is_leaf[l][at++] = take_leaf;
        }
        size[l] = at;
    }
    int chosen = 2 * count - 2;
    for (int l = limit - 1; l >= 0; l--) {
        int leaves = 0;
        for (int i = 0; i < chosen; i++) leaves += is_leaf[l][i];
        for (int i = 0; i < leaves; i++) lengths[i]++;
        chosen = 2 * (chosen - leaves);
    }
}
}  // namespace

void code_lengths(const int64_t* counts, int limit, uint8_t* lengths) {
    int64_t total = 0;
    for (int s = 0; s < 256; s++) total += counts[s];
    Item items[kMaxItems];
    int count = 0;
    for (int s = 0; s < 256; s++)
        if (counts[s] > 0 && counts[s] * kMinShare >= total) items[count++] = {counts[s], s};
    std::sort(items, items + count, [](const Item& a, const Item& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.symbol < b.symbol;
    });
    count = std::min(count, (1 << limit) - 1);
    int64_t escaped = total;
    for (int i = 0; i < count; i++) escaped -= items[i].weight;
    items[count++] = {std::max<int64_t>(1, escaped), kEscape};
    std::sort(items, items + count, [](const Item& a, const Item& b) {
        return a.weight != b.weight ? a.weight < b.weight : a.symbol < b.symbol;
    });
    int result[kMaxItems];
    package_merge(items, count, limit, result);
    std::memset(lengths, 0, 256);
    for (int i = 0; i < count; i++)
        if (items[i].symbol != kEscape) lengths[items[i].symbol] = uint8_t(result[i]);
}

bool build_table(const uint8_t* lengths, CodeTable* table) {
    int left = 256, of_length[9] = {0};
    for (int s = 0; s < 256; s++) {
        if (lengths[s] > 8) return false;
        if (lengths[s]) left -= 256 >> lengths[s];
        of_length[lengths[s]]++;
    }
    if (left <= 0 || (left & (left - 1))) return false;
    int escape = 8;
    while ((256 >> escape) != left) escape--;

    int next[10], code = 0;
    for (int l = 1; l <= 8; l++) {
        next[l] = code;
        code = (code + of_length[l] + (l == escape)) << 1;
    }
    auto reversed = [](int value, int length) {
        int result = 0;
        for (int i = 0; i < length; i++) result |= (value >> i & 1) << (length - 1 - i);
        return result;
    };
    // The escape comes after all symbols of its length.
    int escape_code = escape ? reversed(next[escape] + of_length[escape], escape) : 0;
    for (int i = escape_code; i < 256; i += 1 << escape) {
        table->symbol[i] = table->distance[i] = 0;
        table->consumed[i] = uint8_t(escape | kEscaped);
    }
    table->lowest = table->highest = 0;
    for (int s = 0; s < 256; s++) {
        int length = lengths[s];
        if (!length) {
            table->code[s] = uint8_t(escape_code);
            table->length[s] = uint8_t(escape | kEscaped);
            continue;
        }
        int bits = reversed(next[length]++, length);
        table->code[s] = uint8_t(bits);
        table->length[s] = uint8_t(length);
        const int distance = s < 128 ? s : s - 255;
        table->lowest = std::min(table->lowest, distance);
        table->highest = std::max(table->highest, distance);
        for (int i = bits; i < 256; i += 1 << length) {
            table->symbol[i] = uint8_t(s);
            table->consumed[i] = uint8_t(s ? length : length | kZero);
            table->distance[i] = uint8_t(distance + 128);
        }
    }
    for (int s = 0; s < 256; s++) table->entry[s] = uint16_t(table->code[s] | table->length[s] << 8);
    return true;
}

}  // namespace gz

extern "C" int64_t gz_code_lengths(const int64_t* counts, uint64_t rows, int32_t limit, uint8_t* lengths) {
    if (limit < 1 || limit > gz::kMaxLimit) return GZ_BAD_ARGUMENT;
    for (uint64_t row = 0; row < rows; row++) gz::code_lengths(counts + 256 * row, limit, lengths + 256 * row);
    return 0;
}
