// The little of CUDA that the launchers need; host_shim.h has the same for a build without CUDA.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mlp_offload::cuda {

// A call of CUDA failed; the message names the call and the reason.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace mlp_offload::cuda

#if !defined(__CUDACC__)
#include "cuda/host_shim.h"
#else
#include <cuda_runtime.h>

namespace mlp_offload::cuda {

inline void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw CudaError(std::string(call) + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ", " +
                  std::to_string(static_cast<int>(result)) + ")");
}

// Makes `device` the calling thread's current one while it lives. Callers that have it current already (as a rank has
// after torch.cuda.set_device) are left alone: cudaSetDevice takes memory on a device that was not used before.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

// Throws CudaError unless `device` is there and runs `kernel`.
template <class Kernel>
void check_device(int device, Kernel* kernel) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInsufficientDriver) {
    throw CudaError("no NVIDIA driver, or one older than CUDA " + std::to_string(CUDART_VERSION / 1000) +
                    " needs (cudaErrorInsufficientDriver)");
  }
  check(counted, "cudaGetDeviceCount");
  if (device < 0 || device >= count) {
    throw CudaError("no CUDA device " + std::to_string(device) + "; there are " + std::to_string(count));
  }
  const OnDevice on(device);
  int own_address = 0;
  check(cudaDeviceGetAttribute(&own_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
        "cudaDeviceGetAttribute");
  if (own_address == 0) {
    throw CudaError("CUDA device " + std::to_string(device) + " does not reach pinned host memory by the host's address");
  }
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

// Asynchronous, on `stream` (a cudaStream_t) of the current device.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t stream,
            const Arguments&... arguments) {
  kernel<<<blocks, threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), "kernel launch");
}

// As launch, for kernels that call __syncthreads(); only the host build needs to know.
template <class... Parameters, class... Arguments>
void launch_in_step(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t stream,
                    const Arguments&... arguments) {
  launch(kernel, blocks, threads, stream, arguments...);
}

inline void clear(std::uint64_t address, std::size_t nbytes, std::uint64_t stream) {
  check(cudaMemsetAsync(reinterpret_cast<void*>(address), 0, nbytes, reinterpret_cast<cudaStream_t>(stream)),
        "cudaMemsetAsync");
}

}  // namespace mlp_offload::cuda
#endif
