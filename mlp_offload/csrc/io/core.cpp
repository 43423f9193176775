#include "io/core.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "io/crc32c.h"

namespace mlp_offload::io {
namespace {

// EAGAIN from a file is a shortage of kernel memory that passes: wait 1 us, 2 us ... 8 ms, and give up after about 8 s.
constexpr unsigned kRetryLimit = 1000;

void back_off(unsigned retries) {
  std::this_thread::sleep_for(std::chrono::microseconds(1u << std::min(retries, 13u)));
}

}  // namespace

void Fd::close() {
  // On Linux the descriptor is gone even when close() reports an error, and nothing written waits for it.
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

Fd open_file(const Settings& settings) {
  int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
#ifdef O_DIRECT
  if (settings.direct) flags |= O_DIRECT;
#endif
  int number;
  do {
    number = ::open(settings.path.c_str(), flags);
  } while (number < 0 && errno == EINTR);
  if (number < 0) throw std::system_error(errno, std::generic_category(), settings.path);
  return Fd(number);
}

bool Core::register_buffers(char*, uint64_t) { return false; }

void Core::enqueue(const RequestPtr& request) {
  bool queued = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!accepting_) throw std::logic_error("the I/O engine of " + settings.path + " is closed");
    request->sequence_ = ++last_sequence_;
    if (broken_ != 0) drop_rest(request, broken_);
    if (request->next_block_ < request->block_count) {
      live_.emplace(request->sequence_, request);
      waiting_[static_cast<size_t>(request->operation)].push_back(request);
      queued = true;
    }
  }
  if (queued)
    wake();
  else
    request->complete();  // of 0 bytes, or the engine is broken
}

// [Note: both directions at once] A device reads and writes at the same time, so the direction with fewer blocks in
// flight goes next, and they alternate on a tie. Neither queue can starve the other; alone, each gets all the depth.
bool Core::next_block(Block& block) {
  const bool reads = !waiting_[0].empty(), writes = !waiting_[1].empty();
  if (!reads && !writes) return false;
  int direction = writes ? 1 : 0;
  if (reads && writes)
    direction = blocks_in_flight_[0] == blocks_in_flight_[1] ? 1 - last_direction_
                                                             : blocks_in_flight_[1] < blocks_in_flight_[0];
  last_direction_ = direction;
  auto& queue = waiting_[direction];
  const RequestPtr request = queue.front();
  const uint64_t index = request->next_block_++;
  if (index == 0) request->start();
  if (request->next_block_ == request->block_count) queue.pop_front();
  ++request->blocks_in_flight_;
  ++blocks_in_flight_[direction];

  const uint64_t begin = index * request->block_bytes;
  block = Block{};
  block.request = request;
  block.index = index;
  block.offset = request->offset + begin;
  block.address = request->address + begin;
  block.nbytes = std::min(request->block_bytes, request->nbytes - begin);
  return true;
}

bool Core::wait_for_block(Block& block) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!next_block(block)) {
    if (stopping_) return false;
    work_.wait(lock);
  }
  return true;
}

bool Core::try_block(Block& block) {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_block(block);
}

bool Core::stopping() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

void Core::before_transfer(Block& block) {
  if (block.request->checksum && block.request->operation == Operation::write)
    block.crc = crc32c(block.address, block.nbytes);
}

Core::Next Core::after_call(Block& block, int64_t result) {
  if (result < 0) {
    if (result == -EINTR) return Next::again;
    if (result == -EAGAIN && ++block.retries < kRetryLimit) {
      back_off(block.retries);
      return Next::again;
    }
    block.error = static_cast<int>(-result);
    return Next::finished;
  }
  block.retries = 0;
  uint64_t moved = block.transferred + static_cast<uint64_t>(result);
  // A short direct transfer may end inside a device block: go on from the last point that direct I/O can start at.
  if (settings.direct && moved < block.nbytes) moved -= moved % settings.alignment;
  if (moved == block.transferred) {  // no progress: a read is at the end of the file, a write has no reason for this
    if (block.request->operation == Operation::read)
      block.early_eof = true;
    else
      block.error = EIO;
    return Next::finished;
  }
  block.transferred = moved;
  return moved == block.nbytes ? Next::finished : Next::again;
}

void Core::finish(Block& block) {
  const RequestPtr request = std::move(block.request);
  const bool failed = block.error != 0 || block.early_eof;
  if (!failed && request->checksum && request->operation == Operation::read)
    block.crc = crc32c(block.address, block.nbytes);
  bool retired;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --blocks_in_flight_[static_cast<size_t>(request->operation)];
    --request->blocks_in_flight_;
    if (request->checksum) request->block_crcs_[block.index] = block.crc;
    if (failed && request->error_ == 0 && !request->early_eof_) {
      request->early_eof_ = block.early_eof;
      drop_rest(request, block.error);
    }
    retired = retire_if_finished(request);
  }
  if (retired) request->complete();
}

void Core::drop_rest(const RequestPtr& request, int error) {
  if (request->error_ == 0 && !request->early_eof_) request->error_ = error;
  if (request->next_block_ == request->block_count) return;
  request->next_block_ = request->block_count;
  auto& queue = waiting_[static_cast<size_t>(request->operation)];
  queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
}

bool Core::retire_if_finished(const RequestPtr& request) {
  if (request->blocks_in_flight_ != 0 || request->next_block_ != request->block_count) return false;
  if (live_.erase(request->sequence_) == 0) return false;
  if (live_.empty()) idle_.notify_all();
  return true;
}

std::vector<RequestPtr> Core::drop_all(int error, bool also_started) {
  std::vector<RequestPtr> retired;
  std::vector<RequestPtr> all;
  for (const auto& entry : live_) all.push_back(entry.second);
  for (const RequestPtr& request : all) {
    if (request->next_block_ == request->block_count || (request->next_block_ != 0 && !also_started)) continue;
    drop_rest(request, error);
    if (retire_if_finished(request)) retired.push_back(request);
  }
  return retired;
}

void Core::break_down(int error) {
  std::vector<RequestPtr> retired;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = error;
    retired = drop_all(error, true);
  }
  for (const RequestPtr& request : retired) request->complete();
}

std::vector<InFlight> Core::in_flight() const {
  const double now = now_seconds();
  std::vector<InFlight> list;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [sequence, request] : live_)
    list.push_back({request->operation, request->offset, request->nbytes, now - request->submitted_seconds});
  return list;
}

bool Core::drain(double timeout_seconds) {
  const auto deadline = deadline_after(timeout_seconds);
  std::vector<RequestPtr> retired;
  std::unique_lock<std::mutex> lock(mutex_);
  accepting_ = false;
  for (bool also_started : {false, true}) {
    retired = drop_all(ECANCELED, also_started);
    lock.unlock();
    for (const RequestPtr& request : retired) request->complete();
    lock.lock();
    if (!also_started) idle_.wait_until(lock, deadline, [this] { return live_.empty(); });
  }
  stopping_ = true;
  const bool idle = live_.empty();
  lock.unlock();
  wake();
  return idle;
}

}  // namespace mlp_offload::io
