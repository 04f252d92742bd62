// Every FARANDOLE_* variable: name, type, default and meaning, once. Parsed once, passed down.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace farandole {

struct Config {
  double timeout = 1800;                // FARANDOLE_TIMEOUT
  double start_timeout = 300;           // FARANDOLE_START_TIMEOUT
  double warn_after = 10;               // FARANDOLE_WARN_AFTER
  double link_timeout = 1.5;            // FARANDOLE_LINK_TIMEOUT
  size_t bucket_bytes = 25 << 20;       // FARANDOLE_BUCKET_BYTES
  size_t first_bucket_bytes = 1 << 20;  // FARANDOLE_FIRST_BUCKET_BYTES
  size_t in_place_bytes = 4 << 20;      // FARANDOLE_IN_PLACE_BYTES
  size_t fusion_bytes = 64 << 20;       // FARANDOLE_FUSION_BYTES
  size_t name_cache = 16384;            // FARANDOLE_NAME_CACHE
  size_t arena_bytes = 0;               // FARANDOLE_ARENA_BYTES; 0: by default_arena_bytes()
  double spin_us = 50;                  // FARANDOLE_SPIN_US
  std::string progress = "auto";        // FARANDOLE_PROGRESS: auto, thread, caller
  std::string cma = "auto";             // FARANDOLE_CMA: auto, 1, 0
  std::string transport = "auto";       // FARANDOLE_TRANSPORT: auto, shm, tcp, mpi
  std::string wire = "plain";           // FARANDOLE_WIRE: plain, checked, sealed
  std::string iface;                    // FARANDOLE_IFACE
  std::string insecure = "0";           // FARANDOLE_INSECURE: 0, 1
  std::string pickle = "on";            // FARANDOLE_PICKLE: on, off
  std::string level = "canonical";      // FARANDOLE_LEVEL
  std::string algorithm;                // FARANDOLE_ALGORITHM
  std::string device_path = "auto";  // FARANDOLE_DEVICE_PATH: auto, or a way (devices/device_paths)
  std::string nccl = "auto";         // FARANDOLE_NCCL: auto, off, a file
  size_t device_bucket_bytes = 32 << 20;  // FARANDOLE_DEVICE_BUCKET_BYTES
  size_t device_link_blocks = 0;          // FARANDOLE_DEVICE_LINK_BLOCKS; 0: by the links
  size_t staged_piece_bytes = 4 << 20;    // FARANDOLE_STAGED_PIECE_BYTES
  std::string tuning = "auto";            // FARANDOLE_TUNING: auto, kept, off, a file
  std::string check_weights = "2000";     // FARANDOLE_CHECK_WEIGHTS: first, off, a number
  std::string numerics = "warn";          // FARANDOLE_NUMERICS: warn, error, off
  std::string log_level = "warning";      // FARANDOLE_LOG
  std::string trace;                      // FARANDOLE_TRACE
  std::string timeline;                   // FARANDOLE_TIMELINE
  std::string tf_op = "auto";             // FARANDOLE_TF_OP: auto, async, pair
  std::string fault;                      // FARANDOLE_FAULT

  /// Reads the environment, with Horovod's variables where ours are not set; throws
  /// Error(invalid_argument) naming a variable that cannot be read.
  static Config from_environment();
};

/// One variable as `farandole info` shows it.
struct Setting {
  std::string name;
  std::string type;
  std::string value;
  std::string fallback;
  std::string doc;
  std::string horovod;  // Horovod's variables that are read where this one is not set
};
std::vector<Setting> settings(const Config& config);

/// The settings that must be the same on all ranks, as text.
std::string agreed_settings(const Config& config);

/// A sentence for each variable of the environment that is called FARANDOLE_* and that nobody
/// reads.
std::vector<std::string> unread_variables();

}  // namespace farandole
