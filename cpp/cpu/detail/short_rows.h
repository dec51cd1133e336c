#pragma once

// Rows of few elements: a tile has several rows as columns, so that a register holds elements of
// different rows, and the cost of a row's reductions and loops is that of a few of its elements.

#include <algorithm>

#include "detail/simd.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Most columns of a short row. For longer rows, exchanging rows and columns takes longer than the
// loops that it saves; for kernels with short loops, from fewer columns on.
inline constexpr int64_t kShortGroup = 32;
// Elements per tile: a few tiles of float stay in the L1 cache.
inline constexpr int64_t kTile = 2048;
inline constexpr int64_t kMostTileRows = 256;
// Tiles whose terms a tile of sums adds in the compute type, before they are added in double.
inline constexpr int64_t kTileAdditions = 16;

/// Element `column` of a tile's row `row` is at [column * width + row].
template <class C>
struct Tile {
  C at[kTile] = {};
  operator C*() { return at; }
  operator const C*() const { return at; }
};

/// The shape of tiles of rows that lie one after another. Rows with the same index modulo `groups`
/// share `parameters` numbers, each for columns / parameters adjacent columns.
struct ShortRows {
  int64_t columns, groups, parameters;
  int64_t width;  // lanes: a multiple of the widest register, so that no loop has a remainder
  int64_t rows;   // most rows of a tile; multiples of `groups`, if there is room for one

  ShortRows(int64_t columns_, int64_t groups_, int64_t parameters_)
      : columns(columns_),
        groups(groups_),
        parameters(parameters_),
        width(std::clamp<int64_t>(kTile / columns, 1, kMostTileRows) / 16 * 16),
        rows(groups > width ? width : width / groups * groups) {}

  int64_t elements() const { return columns * width; }

  /// Reads `count` rows. Lanes without a row are 0.
  template <class T>
  void read(Compute<T>* tile, const T* from, int64_t row_stride, int64_t count) const {
    Compute<T> natural[kTile];
    widen_rows(natural, from, row_stride, columns, count);
    exchange(tile, natural, count);
  }

  /// Copies a number for each of `count` rows. Lanes without a row are 0.
  template <class C>
  void read_rows(C* to, const C* from, int64_t count) const {
    std::copy_n(from, count, to);
    std::fill_n(to + count, width - count, C(0));
  }

  /// Writes `count` rows, rounded.
  template <class T>
  void write(T* to, const Compute<T>* tile, int64_t count) const {
    using C = Compute<T>;
    if (columns == 1) return narrow_run(to, tile, count);
    C natural[kTile];
    for (int64_t column = 0; column < columns; ++column) {
      const C* const from = tile + column * width;
#pragma GCC ivdep
      for (int64_t row = 0; row < count; ++row) natural[row * columns + column] = from[row];
    }
    narrow_run(to, natural, count * columns);
  }

  /// Reads the parameters of the rows from `first` on, or sets them to `otherwise`.
  template <class C>
  void read_parameters(C* tile, const void* values, Dtype dtype, int64_t first, C otherwise) const {
    if (values == nullptr) {
      std::fill_n(tile, elements(), otherwise);
      return;
    }
    constexpr int64_t kRun = 512;
    C natural[kTile], buffer[kRun];
    const int64_t all = groups * parameters;
    int64_t at = first % groups * parameters;
    for (int64_t done = 0; done < rows * parameters;) {
      const int64_t count = std::min({kRun, rows * parameters - done, all - at});
      std::copy_n(read_run(buffer, values, at, 1, count, dtype), count, natural + done);
      done += count;
      at = at + count == all ? 0 : at + count;
    }
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t parameter = column / (columns / parameters);
      C* const to = tile + column * width;
      for (int64_t row = 0; row < rows; ++row) to[row] = natural[row * parameters + parameter];
      std::fill_n(to + rows, width - rows, C(0));
    }
  }

  /// Adds the lanes of a tile to the sums of their parameters, and sets the tile to 0. Row 0 of the
  /// tile belongs to group `first`.
  template <class C>
  void add_parameters(double* sums, C* tile, int64_t first) const {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t parameter = column / (columns / parameters);
      const C* const from = tile + column * width;
      if (groups == 1) {
        double total[8] = {};
        for (int64_t row = 0; row < width; row += 8)
          for (int64_t k = 0; k < 8; ++k) total[k] += static_cast<double>(from[row + k]);
        sums[parameter] += ((total[0] + total[1]) + (total[2] + total[3])) +
                           ((total[4] + total[5]) + (total[6] + total[7]));
        continue;
      }
      int64_t group = first;
      const int64_t count = groups > rows ? std::min(rows, groups - first) : rows;
      for (int64_t row = 0; row < count; ++row) {
        sums[group * parameters + parameter] += static_cast<double>(from[row]);
        group = group + 1 == groups ? 0 : group + 1;
      }
    }
    std::fill_n(tile, elements(), C(0));
  }

  /// Calls tile(first, count, group) for the tiles of the groups begin <= group < stop of samples:
  /// rows first, first + 1, ..., of which the first belongs to `group`. Calls end(group) after the
  /// last of each few tiles with the same groups, to add up their sums. Unless the groups are all,
  /// a tile has as many rows as possible of one sample.
  template <class Body, class End>
  void for_each_tile(int64_t sample, int64_t last, int64_t begin, int64_t stop, const Body& tile,
                     const End& end) const {
    int64_t tiles = 0;
    if (groups <= rows) {
      for (int64_t at = sample * groups; at < last * groups; at += rows) {
        tile(at, std::min(rows, last * groups - at), int64_t{0});
        if (++tiles % kTileAdditions == 0) end(int64_t{0});
      }
      end(int64_t{0});
      return;
    }
    for (int64_t group = begin; group < stop; group += rows) {
      for (int64_t each = sample; each < last; ++each) {
        tile(each * groups + group, std::min(rows, stop - group), group);
        if (++tiles % kTileAdditions == 0) end(group);
      }
      end(group);
    }
  }

 private:
  template <class C>
  void exchange(C* tile, const C* natural, int64_t count) const {
    for (int64_t column = 0; column < columns; ++column) {
      C* const to = tile + column * width;
      if (columns == 1) {
        std::copy_n(natural, count, to);
      } else {
#pragma GCC ivdep
        for (int64_t row = 0; row < count; ++row) to[row] = natural[row * columns + column];
      }
      std::fill_n(to + count, width - count, C(0));
    }
  }
};

/// The split of the sums over samples of short rows into tasks: chunks of samples, of which each
/// has strips of its groups. It depends on the shape alone.
struct ShortChunks {
  int64_t chunks, samples;  // samples per chunk
  int64_t strips, groups;   // groups per strip: all, or whole tiles

  ShortChunks(const ShortRows& rows, int64_t all_samples) {
    constexpr int64_t kTaskElements = 1 << 15;  // takes longer than starting a thread
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t wanted =
        std::clamp<int64_t>(all_samples * rows.groups * rows.columns / kTaskElements, 1, 64);
    // With fewer samples, reading the sums of the chunks would take as long as the samples.
    chunks = std::clamp<int64_t>(all_samples / 32, 1, wanted);
    samples = ceil_div(all_samples, chunks);
    chunks = ceil_div(all_samples, samples);
    strips = std::clamp<int64_t>(rows.groups / rows.rows, 1, ceil_div(wanted, chunks));
    groups = ceil_div(ceil_div(rows.groups, strips), rows.rows) * rows.rows;
    if (strips == 1) groups = rows.groups;
    strips = ceil_div(rows.groups, groups);
  }

  int64_t tasks() const { return chunks * strips; }

  /// ShortRows::for_each_tile() for a task.
  template <class Body, class End>
  void for_each_tile(const ShortRows& rows, int64_t all_samples, int64_t task, const Body& tile,
                     const End& end) const {
    const int64_t first = task / strips * samples, begin = task % strips * groups;
    rows.for_each_tile(first, std::min(first + samples, all_samples), begin,
                       std::min(begin + groups, rows.groups), tile, end);
  }
};

}  // namespace torchkiln::cpu::TORCHKILN_ISA
