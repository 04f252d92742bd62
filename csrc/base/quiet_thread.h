// A thread of our own, which no signal of the program interrupts.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace farandole {

/// Starts a thread in which all signals are blocked: they are for the program's own threads. `name`
/// is what ps shows, 15 characters at most. Throws Error(resource), naming it, where there can be
/// none.
std::thread start_quiet_thread(const std::string& name, std::function<void()> body);

}  // namespace farandole
