#pragma once

// The gradients of group norm on the CPU for groups of planes, and of channels-last spans.

#include "group_norm/common.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Maximum number of elements whose gradients g, of the activation's argument, are kept from the
// first pass for the second: 256 KiB in float32. Where grad_x has the compute type, it has room for
// all of them.
inline constexpr int64_t kKeptElements = 1 << 16;

/// Memory for g: in grad_x if it has the compute type, else in a vector, which keeps its memory
/// from one reset() to the next. With too many elements the vector has room for one run.
template <class T>
class KeptGradients {
 public:
  using C = Compute<T>;

  /// `may_write`: whether the runs of grad_x are adjacent elements.
  void reset(const GroupNormBackward& p, int64_t elements, bool may_write = true) {
    in_grad_x_ = may_write && std::is_same_v<T, C> ? static_cast<C*>(p.grad_x) : nullptr;
    keeps_ = in_grad_x_ != nullptr || elements <= kKeptElements;
    if (in_grad_x_ == nullptr) kept_.resize(static_cast<size_t>(keeps_ ? elements : kChannelRun));
  }

  bool is_in_grad_x() const { return in_grad_x_ != nullptr; }
  /// Whether a second pass finds the g of the first.
  bool keeps() const { return keeps_; }
  /// The place of a run's g: the run begins at `at` in grad_x, after `done` elements of other runs.
  C* place(int64_t at, int64_t done) {
    return in_grad_x_ != nullptr ? in_grad_x_ + at : kept_.data() + (keeps_ ? done : 0);
  }

 private:
  C* in_grad_x_ = nullptr;
  bool keeps_ = false;
  std::vector<C> kept_;
};

/// The sums in the workspace for a sample, or a chunk of samples: of g, then of g * n, for each
/// channel.
inline double* sums_of(const GroupNormBackward& p, int64_t sample) {
  return static_cast<double*>(p.workspace) + sample * 2 * p.layout.channels;
}

/// The numbers in the gradient of a group: grad_x = g * scale - slope * (x - mean) - level.
template <class C>
struct GroupSlope {
  C slope, level;
};

/// Computes the slope of a group from `total`, the sums of weight * g and weight * g * n.
template <class C>
GroupSlope<C> slope_of(const GroupStatistics<C>& own, const Pair<double>& total,
                       const GroupLayout& layout) {
  const double share = static_cast<double>(own.rstd) / static_cast<double>(layout.count());
  const double slope = total.second * share * static_cast<double>(own.rstd);
  return {static_cast<C>(slope),
          static_cast<C>(total.first * share - slope * static_cast<double>(own.low))};
}

/// Computes the slope of a group from the sums of g and of g * (x - mean) of its channels. The
/// latter become the sums of g * n.
template <class C>
GroupSlope<C> slope_of(const GroupStatistics<C>& own, const C* weight, const double* sums,
                       double* products, const GroupLayout& layout) {
  const auto low = static_cast<double>(own.low), rstd = static_cast<double>(own.rstd);
  const int64_t channels = layout.channels_per_group();
  for (int64_t i = 0; i < channels; ++i) products[i] = (products[i] - low * sums[i]) * rstd;
  const auto term = [&](int64_t i) {
    const auto each = static_cast<double>(weight[i]);
    return Pair<double>{each * sums[i], each * products[i]};
  };
  Pair<double> total{};
  if (channels < kSums) {  // running sums take as long as the other work of a small group
    for (int64_t i = 0; i < channels; ++i) {
      const Pair<double> each = term(i);
      total = {total.first + each.first, total.second + each.second};
    }
  } else {
    double of_sums[kSums] = {}, of_products[kSums] = {};
    add_run(of_sums, of_products, true, channels, term);
    total = {total_of(of_sums), total_of(of_products)};
  }
  return slope_of(own, total, layout);
}

/// Groups of planes. The vectors keep their memory from one call of compute() to the next.
template <class T>
class PlaneGradients {
 public:
  using C = Compute<T>;

  explicit PlaneGradients(const GroupNormBackward& p)
      : p_(p), operands_(p), activation_(loops_of<C>(p.activation)) {}

  /// Computes the groups first <= group < end, which are adjacent in memory.
  void compute(int64_t first, int64_t end) {
    const int64_t each = p_.layout.channels_per_group(), pixels = p_.layout.inner;
    first_ = first * each;
    last_ = end * each;
    begin_ = first_ * pixels;
    const int64_t elements = (last_ - first_) * pixels;
    kept_.reset(p_, elements);
    for (auto* const sums : {&sums_, &products_})
      sums->assign(static_cast<size_t>(last_ - first_), 0);
    factors_.resize(sums_.size());
    for (int64_t plane = first_; plane < last_; ++plane)
      factors_at(plane) = {operands_.of_plane(plane), {}};
    const auto add = [&](int64_t at, int64_t plane, int64_t planes, int64_t length) {
      C* const g = place_of(at);
      read(g, at, plane, planes, length);
      for (int64_t k = 0; k < planes; ++k) {
        const Pair<double> found = run_sums(g + k * length, from_mean_ + k * length, C(0), length);
        sums_[static_cast<size_t>(plane + k - first_)] += found.first;
        products_[static_cast<size_t>(plane + k - first_)] += found.second;
      }
    };
    for_each_plane_run(pixels, first_, last_, add);
    for (int64_t group = first; group < end; ++group) end_group(group);
    if (p_.grad_x == nullptr) return;
    const auto write = [&](int64_t at, int64_t plane, int64_t planes, int64_t length) {
      write_gradients(at, plane, planes, length, elements <= kChannelRun);
    };
    for_each_plane_run(pixels, first_, last_, write);
  }

 private:
  /// The factors of a plane, and the slope of its group.
  struct Factors : GroupFactors<C>, GroupSlope<C> {};

  Factors& factors_at(int64_t plane) { return factors_[static_cast<size_t>(plane - first_)]; }

  C* place_of(int64_t at) { return kept_.place(at, at - begin_); }

  /// Computes g and x - mean of a run.
  void read(C* g, int64_t at, int64_t plane, int64_t planes, int64_t length) {
    C buffer[kChannelRun], z[kChannelRun];
    const C* const x = read_run(buffer, p_.x, at, 1, planes * length, p_.dtype);
    for (int64_t k = 0; k < planes; ++k) {
      const Factors own = factors_at(plane + k);
      const int64_t begin = k * length;
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + length; ++i) {
        from_mean_[i] = x[i] - own.mean;
        z[i] = from_mean_[i] * own.scale + own.shift;
      }
    }
    activation_.gradients(g, read_run(buffer, p_.grad, at, 1, planes * length, p_.dtype), z,
                          planes * length);
  }

  /// Computes the slope of a group, and writes the sums of its channels into the workspace.
  void end_group(int64_t group) {
    const int64_t each = p_.layout.channels_per_group(), own = group % p_.layout.groups;
    const double* const sums = sums_.data() + group * each - first_;
    double* const products = products_.data() + group * each - first_;
    const GroupSlope<C> slope = slope_of(operands_.statistics(group), operands_.weight(own * each),
                                         sums, products, p_.layout);
    double* const to = sums_of(p_, group / p_.layout.groups) + own * each;
    Factors* const factors = &factors_at(group * each);
    for (int64_t i = 0; i < each; ++i) {
      to[i] = sums[i];
      to[p_.layout.channels + i] = products[i];
      static_cast<GroupSlope<C>&>(factors[i]) = slope;
    }
  }

  /// Writes grad_x of a run. `is_read`: it is the run that was read last.
  void write_gradients(int64_t at, int64_t plane, int64_t planes, int64_t length, bool is_read) {
    C buffer[kChannelRun], result[kChannelRun];
    C* const g = place_of(at);
    if (!kept_.keeps()) {
      read(g, at, plane, planes, length);
      is_read = true;
    }
    const C* const x =
        is_read ? from_mean_ : read_run(buffer, p_.x, at, 1, planes * length, p_.dtype);
    C* const to = kept_.is_in_grad_x() ? g : result;
    for (int64_t k = 0; k < planes; ++k) {
      const Factors own = factors_at(plane + k);
      const C mean = is_read ? C(0) : own.mean;
      const int64_t begin = k * length;
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + length; ++i)
        to[i] = g[i] * own.scale - own.slope * (x[i] - mean) - own.level;
    }
    if (!kept_.is_in_grad_x()) narrow_run(static_cast<T*>(p_.grad_x) + at, to, planes * length);
  }

  const GroupNormBackward& p_;
  GroupOperands<C> operands_;
  ActivationLoops<C> activation_;
  KeptGradients<T> kept_;
  int64_t first_ = 0, last_ = 0, begin_ = 0;
  C from_mean_[kChannelRun];
  std::vector<double> sums_, products_;
  std::vector<Factors> factors_;
};

/// Channels-last spans. The vectors keep their memory from one span to the next.
template <class T>
class SpanGradients {
 public:
  using C = Compute<T>;

  explicit SpanGradients(const GroupNormBackward& p)
      : p_(p), operands_(p), activation_(loops_of<C>(p.activation)) {}

  void compute(const GroupSpan& span) {
    factors_.load(operands_, span);
    kept_.reset(p_, span.elements(), span.is_dense() || span.pixels_per_run == 1);
    add_up(span);
    const int64_t each = p_.layout.channels_per_group();
    slopes_.resize(static_cast<size_t>(span.slots()));
    levels_.resize(slopes_.size());
    for (int64_t i = 0; i < span.groups; ++i) {
      const int64_t at = i * each;
      const GroupSlope<C> group =
          slope_of(operands_.statistics(span.group + i), operands_.weight(span.channel + at),
                   sums_.data() + at, products_.data() + at, p_.layout);
      std::fill_n(slopes_.data() + at, each, group.slope);
      std::fill_n(levels_.data() + at, each, group.level);
    }
    double* const to = sums_of(p_, span.group / p_.layout.groups) + span.channel;
    std::copy_n(sums_.data(), span.width, to);
    std::copy_n(products_.data(), span.width, to + p_.layout.channels);
    if (p_.grad_x == nullptr) return;
    span.repeat(slopes_);
    span.repeat(levels_);
    write_gradients(span);
  }

 private:
  /// Computes g and x - mean of a run.
  void read(C* g, const GroupSpan& span, int64_t at, int64_t slot, int64_t count) {
    C buffer[kChannelRun], z[kChannelRun];
    const C* const x = span.read(buffer, p_.x, at, count, p_.dtype);
    const C* const mean = factors_.mean.data() + slot;
    const C* const scale = factors_.scale.data() + slot;
    const C* const shift = factors_.shift.data() + slot;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      from_mean_[i] = x[i] - mean[i];
      z[i] = from_mean_[i] * scale[i] + shift[i];
    }
    activation_.gradients(g, span.read(buffer, p_.grad, at, count, p_.dtype), z, count);
  }

  /// Adds g and g * (x - mean) of each channel, in blocks of rows.
  void add_up(const GroupSpan& span) {
    for (auto* const each : {&sums_, &products_}) each->assign(static_cast<size_t>(span.width), 0);
    for (auto* const each : {&block_sums_, &block_products_})
      each->assign(static_cast<size_t>(span.slots()), 0);
    int64_t rows = 0, done = 0;
    span.for_each_run([&](int64_t at, int64_t slot, int64_t count) {
      if (slot == 0 && rows++ == kBlockRows) {
        end_rows(span);
        rows = 1;
      }
      C* const g = kept_.place(at, done);
      done += count;
      read(g, span, at, slot, count);
      add_row(block_sums_.data() + slot, block_products_.data() + slot, static_cast<const C*>(g),
              count, [&](int64_t i) { return from_mean_[i]; });
    });
    end_rows(span);
  }

  void end_rows(const GroupSpan& span) {
    span.fold(block_sums_);
    span.fold(block_products_);
    end_block(sums_.data(), block_sums_.data(), span.width);
    end_block(products_.data(), block_products_.data(), span.width);
    std::fill(block_sums_.begin() + span.width, block_sums_.end(), C(0));
    std::fill(block_products_.begin() + span.width, block_products_.end(), C(0));
  }

  void write_gradients(const GroupSpan& span) {
    C buffer[kChannelRun], result[kChannelRun];
    int64_t done = 0;
    const bool is_read = span.elements() <= span.slots() && span.slots() <= kChannelRun;
    span.for_each_run([&](int64_t at, int64_t slot, int64_t count) {
      C* const g = kept_.place(at, done);
      done += count;
      C* const to = kept_.is_in_grad_x() ? g : result;
      if (!kept_.keeps()) {
        read(g, span, at, slot, count);
      } else if (!is_read) {
        const C* const x = span.read(buffer, p_.x, at, count, p_.dtype);
        const C* const mean = factors_.mean.data() + slot;
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) from_mean_[i] = x[i] - mean[i];
      }
      const C* const scale = factors_.scale.data() + slot;
      const C* const slope = slopes_.data() + slot;
      const C* const level = levels_.data() + slot;
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i)
        to[i] = g[i] * scale[i] - slope[i] * from_mean_[i] - level[i];
      if (!kept_.is_in_grad_x())
        span.write(static_cast<T*>(p_.grad_x) + at, static_cast<const C*>(result), count);
    });
  }

  const GroupNormBackward& p_;
  GroupOperands<C> operands_;
  ActivationLoops<C> activation_;
  SpanFactors<C> factors_;
  KeptGradients<T> kept_;
  C from_mean_[kChannelRun];
  std::vector<C> block_sums_, block_products_, slopes_, levels_;
  std::vector<double> sums_, products_;
};

}  // namespace torchkiln::cpu::TORCHKILN_ISA
