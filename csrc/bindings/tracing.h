// The one trace of this process: all worlds that it joins are in it.
#pragma once

#include <memory>
#include <string>

#include "base/trace.h"
#include "control/host.h"
#include "engine/engine.h"

namespace farandole {

/// The trace into `directory` for this rank of `job`; null when the directory is empty, or cannot
/// be made (one warning). `tuning`: the fingerprint of the world's tuning table.
std::shared_ptr<Trace> start_trace(const std::string& directory, const Host& host,
                                   const std::string& job, const std::string& tuning);
/// The same while ranks run, for `number`, which is the same on all ranks that take part. Throws
/// Error: something is traced already, or the directory cannot be made.
void start_timeline(Engine& engine, const std::string& directory, int number);
/// Ends it and writes this rank's part. Throws Error: nothing was started, or it cannot be written.
void stop_timeline(Engine& engine);
/// Writes this rank's part; the last rank to do so puts all together in `trace.json`. With
/// Python's lock. A failure is one warning.
void finish_trace(Trace* trace);

}  // namespace farandole
