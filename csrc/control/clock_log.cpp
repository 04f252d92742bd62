#include "control/clock_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"

namespace farandole {
namespace {

/// Whole or, on a full disk, not: a reading more or less does not matter.
void append(int file, const std::string& line) {
  while (::write(file, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

}  // namespace

ClockReading reading_of(const RoundTrip& trip) {
  return {trip.sent + (trip.back - trip.sent) / 2,
          (trip.sent - trip.arrived + (trip.back - trip.answered)) / 2,
          trip.both_ways() / 2 + 1};  // rounded up
}

void ClockLog::add(const RoundTrip& trip) {
  const std::lock_guard lock(mutex_);
  if (!quickest_ || trip.both_ways() < quickest_->both_ways()) quickest_ = trip;
  if (++round_trips_ < kRoundTrips) return;
  last_ = reading_of(*quickest_);
  quickest_.reset();
  round_trips_ = 0;
  if (file_) write(*last_);
}

bool ClockLog::is_new() const {
  const std::lock_guard lock(mutex_);
  return !last_;
}

std::optional<ClockReading> ClockLog::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void ClockLog::follow(const std::string& path, const std::string& title) {
  const std::lock_guard lock(mutex_);
  file_.reset();
  if (path.empty()) return;
  file_ =
      Fd(checked(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600),
                 "open " + path));
  struct stat status{};
  if (::fstat(file_.get(), &status) == 0 && status.st_size == 0) append(file_.get(), title + "\n");
  if (last_) write(*last_);
}

void ClockLog::close() {
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) file_.reset();
}

void ClockLog::write(const ClockReading& reading) const {
  append(file_.get(), "[" + std::to_string(reading.at) + "," + std::to_string(reading.ahead) + "," +
                          std::to_string(reading.within) + "]\n");
}

}  // namespace farandole
