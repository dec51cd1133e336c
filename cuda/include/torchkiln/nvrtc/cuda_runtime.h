#pragma once

// NVRTC declares most of the device runtime without a header.

#if __CUDA_ARCH__ >= 900
inline __device__ void cudaGridDependencySynchronize() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
inline __device__ void cudaTriggerProgrammaticLaunchCompletion() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif
