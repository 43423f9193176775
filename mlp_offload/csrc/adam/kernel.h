// The AdamW step over one subgroup: checks, cuts the work into chunks and spreads them over a thread team.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adam/segment.h"
#include "adam/team.h"
#include "adam/update.h"

namespace mlp_offload::adam {

// Names of the variants that this processor runs, fastest first.
std::vector<std::string> variants();

class AdamKernel {
 public:
  // Throws std::invalid_argument for a thread count below 1 or a variant that this processor does not run.
  AdamKernel(int threads, const std::string& variant);
  ~AdamKernel();
  AdamKernel(const AdamKernel&) = delete;
  AdamKernel& operator=(const AdamKernel&) = delete;

  // One step over the record at `state_address`: main_param, exp_avg and exp_avg_sq, `stride_numel` elements each,
  // fp32; with `main_itemsize` 2 main_param is a Remainder, and every segment with a gradient needs a bf16 weight.
  // Segments must not overlap. Throws std::invalid_argument, before anything is written, for a row that points
  // outside the record, a misaligned address, an unknown dtype or group; std::logic_error after close().
  void update(std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
              const Segment* segments, std::int64_t segment_count, const Scalars* groups, std::int64_t group_count);

  // sums[i] of `numels[i]` 16-bit words at `addresses[i]`; see SumFunction. Throws std::logic_error after close().
  void sum_words(const std::int64_t* addresses, const std::int64_t* numels, std::int64_t count, std::uint32_t* sums);

  // Joins the threads. Safe to call twice.
  void close();

  int threads() const { return threads_; }
  const std::string& variant() const { return variant_; }

 private:
  bool in_forked_child() const;
  void run(const std::function<void()>& job, std::size_t chunk_count);

  const int threads_;
  const std::string variant_;
  const UpdateTable& table_;
  const pid_t owner_;
  std::mutex mutex_;  // one update at a time
  std::unique_ptr<Team> team_;
  bool closed_ = false;
};

}  // namespace mlp_offload::adam
