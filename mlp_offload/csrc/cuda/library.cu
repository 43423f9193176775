// The shared library mlp_offload/_cuda.so: what mlp_offload/cuda.py calls. Addresses and the caller's stream (a
// cudaStream_t) come in as integers; nothing waits for the device. Also compiled as plain C++ (host_shim.h).
//
// Every function returns 0, or 1 for arguments that are refused before anything is launched, or 2 where CUDA failed;
// mlp_cuda_error() then says why.
#include "cuda/adam.h"
#include "cuda/copy.h"
#include "cuda/norm.h"
#include "cuda/restart.h"
#include "cuda/sum.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace mlp_offload;

thread_local std::string last_error;

template <class Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::invalid_argument& error) {
    last_error = error.what();
    return 1;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 2;
  }
}

}  // namespace

// Why the calling thread's last call failed; valid until its next one.
EXPORT const char* mlp_cuda_error() { return last_error.c_str(); }

// 0 where `device` runs these kernels.
EXPORT int mlp_cuda_check_device(int device) {
  return guarded([&] { cuda::check_device(device, cuda::adam_step<float>); });
}

// One AdamW step over the record at `state_address`; arguments as of adam::AdamKernel::update, all addresses but those of
// `segments` and `groups` on the device (or in memory that it reaches).
EXPORT int mlp_cuda_adam(int device, std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
                         const adam::Segment* segments, std::int64_t segment_count, const adam::Scalars* groups,
                         std::int64_t group_count, std::uint64_t stream) {
  return guarded([&] {
    const cuda::OnDevice on(device);
    cuda::run_adam(state_address, stride_numel, main_itemsize, segments, segment_count, groups, group_count, stream);
  });
}

// `found_address`: an fp32 that becomes 1 when an element read is inf or nan, or 0: nobody looks.
EXPORT int mlp_cuda_copy(int device, const cuda::Piece* pieces, std::int64_t piece_count, std::uint64_t found_address,
                         std::uint64_t stream) {
  return guarded([&] {
    const cuda::OnDevice on(device);
    cuda::run_copy(pieces, piece_count, found_address, stream);
  });
}

// `inverse_scale_address`: an fp32 that each element is multiplied by, or 0. `sums_address`: 320 fp32 to work in.
// `norm_address`: the fp32 that receives the norm.
EXPORT int mlp_cuda_norm(int device, const cuda::NormTensor* tensors, std::int64_t tensor_count,
                         std::uint64_t inverse_scale_address, std::uint64_t sums_address, std::uint64_t norm_address,
                         std::uint64_t stream) {
  return guarded([&] {
    const cuda::OnDevice on(device);
    cuda::run_norm(tensors, tensor_count, inverse_scale_address, sums_address, norm_address, stream);
  });
}

// Weights become the masters of `segments` where their masters do not belong to them.
EXPORT int mlp_cuda_restart(int device, std::uint64_t state_address, std::int64_t stride_numel,
                            std::int64_t main_itemsize, const adam::Segment* segments, std::int64_t segment_count,
                            std::uint64_t stream) {
  return guarded([&] {
    const cuda::OnDevice on(device);
    cuda::run_restart(state_address, stride_numel, main_itemsize, segments, segment_count, stream);
  });
}

// `sums_address`: a uint32 a run.
EXPORT int mlp_cuda_sum(int device, const cuda::WordRun* runs, std::int64_t run_count, std::uint64_t sums_address,
                        std::uint64_t stream) {
  return guarded([&] {
    const cuda::OnDevice on(device);
    cuda::run_sum(runs, run_count, sums_address, stream);
  });
}

#if !defined(__CUDACC__)
// The order in which the threads of a block run up to a barrier.
EXPORT void mlp_cuda_set_descending(int descending) { cuda::descending_threads = descending != 0; }
#endif
