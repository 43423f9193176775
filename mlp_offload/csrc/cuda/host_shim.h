// Lets the kernels' sources be compiled and run as plain C++, so that their arithmetic and index logic are tested where
// there is no GPU: the threads of a block run one after another. Compile with -ffp-contract=off. Not part of the package.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__ &  // 32 KiB of arguments for every thread are not copied
#define __shared__ static thread_local
#define __launch_bounds__(threads)

namespace mlp_offload::cuda {

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// A block whose threads meet at barriers: every thread has a stack of its own and runs up to the next barrier, then the
// next thread does. The order of threads may be turned round: where a barrier is missing, results then differ.
class Block {
 public:
  Block(unsigned threads, const std::function<void()>& body) : body_(body), contexts_(threads), stacks_(threads) {}

  void run(bool descending) {
    const unsigned threads = static_cast<unsigned>(contexts_.size());
    ended_.assign(threads, false);
    for (unsigned t = 0; t != threads; ++t) {
      stacks_[t].resize(kStackBytes);
      getcontext(&contexts_[t]);
      contexts_[t].uc_stack.ss_sp = stacks_[t].data();
      contexts_[t].uc_stack.ss_size = kStackBytes;
      contexts_[t].uc_link = &scheduler_;
      makecontext(&contexts_[t], enter, 0);
    }
    current_ = this;
    for (unsigned ended = 0; ended == 0;) {
      for (unsigned i = 0; i != threads; ++i) {
        threadIdx.x = descending ? threads - 1 - i : i;
        swapcontext(&scheduler_, &contexts_[threadIdx.x]);
        ended += ended_[threadIdx.x];
      }
      if (ended != 0 && ended != threads) throw CudaError("only some threads of a block reached a barrier");
    }
  }

  static void barrier() { swapcontext(&current_->contexts_[threadIdx.x], &current_->scheduler_); }

 private:
  static constexpr std::size_t kStackBytes = 32768;

  static void enter() {
    current_->body_();
    current_->ended_[threadIdx.x] = true;
  }

  static inline thread_local Block* current_ = nullptr;
  const std::function<void()>& body_;
  ucontext_t scheduler_;
  std::vector<ucontext_t> contexts_;
  std::vector<std::vector<char>> stacks_;
  std::vector<bool> ended_;
};

inline void __syncthreads() { Block::barrier(); }

inline bool descending_threads = false;

class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (device != 0) throw CudaError("no CUDA device " + std::to_string(device) + "; there are 1");
  }
};

template <class Kernel>
void check_device(int device, Kernel*) {
  const OnDevice on(device);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t,
            const Arguments&... arguments) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x != blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x != threads; ++threadIdx.x) kernel(arguments...);
  }
}

template <class... Parameters, class... Arguments>
void launch_in_step(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t,
                    const Arguments&... arguments) {
  const std::function<void()> body = [&] { kernel(arguments...); };
  Block block(threads, body);
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x != blocks; ++blockIdx.x) block.run(descending_threads);
}

inline void add_by_warp(std::uint32_t* total, std::uint32_t mine) { *total += mine; }

inline void clear(std::uint64_t address, std::size_t nbytes, std::uint64_t) {
  std::memset(reinterpret_cast<void*>(address), 0, nbytes);
}

}  // namespace mlp_offload::cuda
