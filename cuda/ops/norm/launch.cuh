#pragma once

// Launches of every plan of choose.h, each defined in the file of its kernel.

#include "choose.h"
#include "torchkiln/core/workspace.h"

namespace torchkiln::cuda {

/// Launches of the forward, compiled per dtype in files of their own.
template <class T>
struct NormForwardByDtype {
  static Status launch(const Norm& p, const OnePassPlan& plan, CUstream_st* stream);
  static Status launch(const Norm& p, const QuantizedPlan& plan, CUstream_st* stream);
};

template <class T>
struct NormBackwardByDtype {
  static Status launch(const NormBackward& p, const norm_gradients::StreamPlan& plan,
                       Allocate allocate, CUstream_st* stream);
};

Status launch(const Norm& p, const NormSlabsPlan& plan, Allocate allocate, CUstream_st* stream);
Status launch(const Norm& p, const SplitNormPlan& plan, Allocate allocate, CUstream_st* stream);

namespace norm_gradients {

Status launch(const NormBackward& p, const FewRowsPlan& plan, Allocate allocate,
              CUstream_st* stream);
Status launch(const NormBackward& p, const BulkPlan& plan, Allocate allocate, CUstream_st* stream);
Status launch(const NormBackward& p, const GradientSlabsPlan& plan, Allocate allocate,
              CUstream_st* stream);
Status launch(const NormBackward& p, const SplitGradientsPlan& plan, Allocate allocate,
              CUstream_st* stream);

}  // namespace norm_gradients
}  // namespace torchkiln::cuda
